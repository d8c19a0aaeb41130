"""The files for GitHub, containers and editors agree with the project.

`make docs-check` checks their schemas.
"""

import itertools
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


def test_the_lock_file_pins_every_requirement_but_torch():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    pinned = {each.name: str(each.specifier)[2:] for each in pins}
    assert not {name for name in pinned if re.match(r"torch$|torchvision|triton|nvidia|cuda", name)}
    locked = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    assert pinned.items() <= {each["name"]: each["version"] for each in locked}.items()
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    wanted = [line for line in lines if line[:1].isalpha()]
    wanted += itertools.chain(*PROJECT["optional-dependencies"].values())
    assert len(wanted) > 30
    for requirement in map(Requirement, wanted):
        if requirement.name != "torch":
            assert requirement.specifier.contains(pinned[requirement.name]), (
                f"{requirement}: type make lock"
            )


def make(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True)


def planned(*words: str) -> str:
    """The commands that make would run for a first setup."""
    result = make("--dry-run", "setup", "VENV=nowhere", "GPU=", *words)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_torch_comes_from_the_index_that_is_named():
    index = "https://download.pytorch.org/whl/cu126"
    lines = planned(f"TORCH_INDEX={index}").splitlines()
    (alone,) = [line for line in lines if f"--index-url {index}" in line]
    (rest,) = [line for line in lines if "--requirement requirements.txt" in line]
    assert lines.index(alone) < lines.index(rest)
    assert "cpu" not in "".join(lines)


def test_timm_is_installed_without_torchvision():
    lines = planned("EXTRAS=wandb timm").splitlines()
    (other,) = [line for line in lines if "--requirement nowhere/wandb.txt" in line]
    (timm,) = [line for line in lines if "--requirement nowhere/timm.txt" in line]
    assert "--no-deps" in timm
    assert "--no-deps" not in other


def test_a_key_beside_args_is_named():
    said = make("train", "a.b=1").stderr
    assert 'a.b=1: no target reads it. Type ARGS="a.b=1"' in said


def test_versions_agree():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == PROJECT["version"]
    assert f"\n## {PROJECT['version']}\n" in (ROOT / "CHANGELOG.md").read_text()
