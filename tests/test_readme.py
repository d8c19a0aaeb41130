"""The commands, excerpts and paths of README.md, and the example that it says to copy, work as written."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from armature import cli, config
from armature.validation import parallelism as checks
from tests import running
from tests.features import refused

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
LIBRARY = (ROOT / "src" / "armature" / "README.md").read_text()
FENCES = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
EXCERPTS = [text for language, text in FENCES if language in ("python", "yaml")]
COMMANDS = [line for language, text in FENCES if language == "bash" for line in text.splitlines()]
TRAIN = [shlex.split(line, comments=True) for line in COMMANDS if "train.py" in line and "sbatch" not in line]
NOT_IN_THE_TREE = (
    "src/mine",
    "configs/*/mine.yaml",
    "configs/local/default.yaml",
)  # what the README tells the user to create


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the template in which the README's commands to copy the example were run."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("configs", "src"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(ROOT / "train.py", folder)
    (copying,) = (text for language, text in FENCES if language == "bash" and "cp -r src/example" in text)
    lines = [line for line in copying.splitlines() if "train.py" not in line]
    assert len(lines) == 3
    subprocess.run(["bash", "-euo", "pipefail", "-c", "\n".join(lines)], cwd=folder, check=True)
    return folder


def run(clone: Path, *overrides: str) -> Path:
    result = subprocess.run(
        [sys.executable, "train.py", *overrides, "logger=none", "trainer.accelerator=cpu", "trainer.precision=32-true"],
        cwd=clone,
        env={**running.environment(), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return clone / "outputs"


def features_table() -> str:
    """The table of what works under which strategy, from the data that the check before launch reads."""
    columns = ("single", "ddp", "shard", "tensor", "pipeline", "deepspeed", "zero3")
    lines = ["| | " + " | ".join(columns) + " |", "| --- |" + " :---: |" * len(columns)]
    for feature in checks.FEATURES:
        kinds = {kind for name, kind in refused() if name == feature}
        kinds |= {"zero3"} if "deepspeed" in kinds else set()
        lines.append(f"| {feature} | " + " | ".join("–" if kind in kinds else "yes" for kind in columns) + " |")
    return "\n".join(lines)


def test_the_table_of_features_is_the_one_that_is_enforced():
    shown = README.split("<!-- refused: begin -->\n")[1].split("\n<!-- refused: end -->")[0]
    assert shown == features_table()


@pytest.mark.slow
def test_the_example_learns_and_neither_the_strategy_nor_a_copy_changes_it(clone):
    commands = re.findall(r"^python train\.py (.*)$", section("Your own model, data and experiment"), re.MULTILINE)
    assert commands == [
        "experiment=example",
        "experiment=example strategy=ddp trainer.devices=2",
        "experiment=example strategy=tensor trainer.devices=2",
        "experiment=mine",
    ]
    for i, command in enumerate(commands):
        run(clone, *command.split(), f"run.name={i}")
        summary = running.summary(clone / "outputs" / str(i))
        assert summary["metrics"]["test/accuracy"] > 0.95
    assert "_target_: mine.model." in (clone / "outputs" / "3" / "config.yaml").read_text()
    # later, when the loss is near zero, the order of additions shows in its fifth digit
    first = running.losses(clone / "outputs" / "0")[:40]
    assert len(first) == 40
    for i in range(1, len(commands)):
        assert running.losses(clone / "outputs" / str(i))[:40] == pytest.approx(first, rel=1e-5)


@pytest.mark.parametrize("excerpt", EXCERPTS, ids=lambda text: text.splitlines()[0])
def test_every_excerpt_is_in_the_file_that_it_names(excerpt):
    name, *lines = excerpt.splitlines()
    text = (ROOT / name.removeprefix("# ")).read_text()
    assert "\n".join(line.strip() for line in lines) in "\n".join(line.strip() for line in text.splitlines())


def test_every_part_of_the_example_has_an_excerpt():
    assert {text.splitlines()[0] for text in EXCERPTS} == {
        *(f"# src/example/{name}.py" for name in ("model", "plan", "data", "task")),
        "# configs/experiment/example.yaml",
    }


@pytest.mark.parametrize("words", TRAIN, ids=" ".join)
def test_every_command_that_trains_composes(words, clone):
    overrides = [word for word in words[words.index("train.py") + 1 :] if not word.startswith("-") and word != "job"]
    if "-m" in words:  # a sweep's first trial
        overrides = [word.split(",")[0] for word in overrides]
    config.register()
    with initialize_config_dir(version_base="1.3", config_dir=str(clone / "configs")):
        cfg = compose("train", overrides=[cli.quoted(override) for override in overrides])
    assert cfg.model._target_


def test_a_mistake_is_reported_in_the_words_that_are_shown(tmp_path):
    (shown,) = (text for _, text in FENCES if text.startswith("$ python train.py"))
    command, *expected = shown.splitlines()
    result = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *command.split()[3:]],
        cwd=tmp_path,
        env=running.environment(),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    for line, printed in zip(expected, result.stderr.strip().splitlines(), strict=True):
        assert printed.startswith(line.removesuffix("…"))


def test_every_path_that_the_readme_names_exists():
    named = set(re.findall(r"(?<![\w/.=])(?:src|configs|scripts|docs|benchmarks|kubernetes)/[\w./*-]*[\w*/]", README))
    assert len(named) > 20
    assert not [n for n in sorted(named) if not n.startswith(NOT_IN_THE_TREE) and not list(ROOT.glob(n.rstrip("/")))]


def test_every_path_that_the_librarys_readme_names_exists():
    spans = re.findall(r"`([\w./*-]+(?:\.py|\.yaml|/))`", LIBRARY)
    assert len(set(spans)) > 30
    here = ROOT / "src" / "armature"
    for span in set(spans):
        pattern = span.rstrip("/") if "/" in span else f"**/{span}"  # a bare name is a file of the row's folder
        assert list(ROOT.glob(pattern)) + list(here.glob(pattern)), span
    for path in (folder for folder in here.iterdir() if folder.is_dir() and folder.name != "__pycache__"):
        assert f"`{path.name}/`" in LIBRARY, f"src/armature/README.md does not say what {path.name}/ is for"


def test_every_module_that_the_readme_runs_exists():
    for name in set(re.findall(r"python -m ([\w.]+)", README)):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


def test_every_make_target_that_the_readme_names_exists():
    named = set(re.findall(r"make ([a-z-]+)", README))
    listed = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, env=dict(os.environ)
    ).stdout
    assert named - set(re.findall(r"make ([a-z-]+)", listed)) <= {"your"}
