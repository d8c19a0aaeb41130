"""The files for GitHub, containers and editors agree with the project.

`make docs-check` checks their schemas.
"""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
FILES = [
    *(ROOT / ".github").rglob("*.yml"),
    ROOT / ".pre-commit-config.yaml",
    ROOT / "CITATION.cff",
    ROOT / "mkdocs.yml",
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_parses(path):
    assert yaml.safe_load(path.read_text())


@pytest.fixture(scope="module")
def jobs():
    return yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]


def test_the_workflow_runs_targets_that_exist_and_has_time_limits(jobs):
    for job in jobs.values():
        assert job["timeout-minutes"] <= 120
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert commands
        assert {
            command.split()[1] for command in commands if command.startswith("make ")
        } <= TARGETS


def test_the_workflow_tests_the_bounds_of_the_requirements(jobs):
    matrix = jobs["fast"]["strategy"]["matrix"]
    assert {name.partition("-")[0] for name in matrix["os"]} == {"ubuntu", "macos"}
    assert f">={min(matrix['python'])}" == PROJECT["requires-python"]
    low, below = re.findall(
        r"^torch>=([\d.]+),<([\d.]+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE
    )[0]
    first, last = (
        tuple(int(part) for part in version.split(".")[:2]) for version in matrix["torch"]
    )
    assert first == tuple(map(int, low.split(".")))
    assert (last[0], last[1] + 1) == tuple(map(int, below.split(".")))


def test_the_image_is_the_one_that_the_trainjob_names():
    text = (ROOT / "Dockerfile").read_text()
    job = yaml.safe_load((ROOT / "kubernetes" / "trainjob.yaml").read_text())
    assert f"docker build --tag {job['spec']['trainer']['image']} ." in text
    version = re.search(r"^FROM python:3\.(\d+)-", text, re.MULTILINE)
    assert version is not None
    assert int(version[1]) >= int(PROJECT["requires-python"].removeprefix(">=3."))
    for source in re.findall(r"^COPY (\S+) ", text, re.MULTILINE):
        assert (ROOT / source).exists()
    requirement = re.search(r"^torch>.*$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert requirement is not None, "the Dockerfile looks for this line"


def test_the_devcontainer_builds_the_same_image():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert (
        ROOT / ".devcontainer" / container["build"]["dockerfile"]
    ).resolve() == ROOT / "Dockerfile"
    workdir = re.search(r"^WORKDIR (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert workdir is not None
    assert container["workspaceFolder"] == workdir[1]


def test_the_hooks_are_tools_of_the_environment():
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"
    for hook in repo["hooks"]:
        assert hook["language"] == "system"
        assert ".venv/bin/" in hook["entry"]


def test_issue_forms_ask_for_something():
    for name in ("bug", "feature"):
        form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
        assert {"name", "description", "body"} <= set(form)
        ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
        assert len(ids) == len(set(ids))
        assert any(field.get("validations", {}).get("required") for field in form["body"])


def test_the_lock_file_pins_every_requirement_but_torch():
    lines = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    pinned = {each.name: str(each.specifier)[2:] for each in map(Requirement, lines)}
    assert not {name for name in pinned if re.match(r"torch$|torchvision|triton|nvidia|cuda", name)}
    files = ROOT.glob("requirements*.txt")
    wanted = [
        line.partition(" #")[0]
        for path in files
        for line in path.read_text().splitlines()
        if line[:1].isalpha()
    ]
    assert len(wanted) > 30
    for requirement in map(Requirement, wanted):
        if requirement.name != "torch":
            assert requirement.specifier.contains(pinned[requirement.name]), (
                f"{requirement}: type make lock"
            )


def planned(*words: str) -> str:
    """The commands that make would run for a first setup."""
    command = ["make", "--dry-run", "setup", "VENV=nowhere", "GPU=", *words]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_torch_comes_from_the_index_that_is_named():
    index = "https://download.pytorch.org/whl/cu126"
    lines = planned(f"TORCH_INDEX={index}").splitlines()
    (alone,) = [line for line in lines if f"--index-url {index}" in line]
    (rest,) = [line for line in lines if "--requirement requirements.txt" in line]
    assert lines.index(alone) < lines.index(rest)
    assert rest.endswith('"torch"')  # as it is installed by then, and no CPU build
    assert "whl/cpu" not in "".join(lines)
    assert "--index-url https" not in planned("TORCH_CPU_INDEX=")


def test_timm_is_installed_without_torchvision():
    lines = planned("EXTRAS=wandb timm").splitlines()
    (others,) = [
        i for i, line in enumerate(lines) if "--requirement requirements-wandb.txt" in line
    ]
    (timm,) = [i for i, line in enumerate(lines) if "--requirement requirements-timm.txt" in line]
    assert others != timm
    assert "--no-deps" in lines[timm]
    assert "--no-deps" not in lines[others]


def test_versions_agree():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == PROJECT["version"]
    assert f"\n## {PROJECT['version']}\n" in (ROOT / "CHANGELOG.md").read_text()
