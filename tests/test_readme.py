"""The commands and excerpts of README.md, and the example that it says to copy, work as written.

tests/test_docs.py checks links, paths and commands of all documents.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose

from armature import config
from armature.validation import parallelism as checks
from armature.validation import quoting
from armature.validation.composing import composing
from tests import running
from tests.features import refused

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
OWN_PARTS = (ROOT / "docs" / "your-own.md").read_text()
LIBRARY = (ROOT / "src" / "armature" / "README.md").read_text()
FENCES = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
EXPLAINED = re.findall(r"^```(\w*)\n(.*?)^```", OWN_PARTS, re.DOTALL | re.MULTILINE)
COMMANDS = [line for language, text in FENCES if language == "bash" for line in text.splitlines()]
TRAIN = [
    shlex.split(line, comments=True)
    for line in COMMANDS
    if "train.py" in line and "sbatch" not in line
]


def section(title: str, page: str) -> str:
    return page.split(f"\n## {title}\n")[1].split("\n## ")[0]


def copying(fences: list[tuple[str, str]]) -> list[str]:
    """The words of the page's line that copies the example."""
    (line,) = (
        line
        for language, text in fences
        if language == "bash"
        for line in text.splitlines()
        if "make new" in line
    )
    return shlex.split(line, comments=True)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the template in which the README's commands to copy the example were run."""
    folder = tmp_path_factory.mktemp("clone")
    ignored = shutil.ignore_patterns(
        "__pycache__", "*.egg-info", "moons", "moons.yaml"
    )  # a user's own
    for name in ("configs", "scripts", "src"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "train.py", folder)
    assert copying(FENCES) == copying(EXPLAINED) == ["make", "new", "NAME=moons"]
    subprocess.run([sys.executable, "scripts/new.py", "moons"], cwd=folder, check=True)
    return folder


def run(clone: Path, *overrides: str) -> Path:
    result = subprocess.run(
        [
            sys.executable,
            "train.py",
            *overrides,
            "logger=none",
            "trainer.accelerator=cpu",
            "trainer.precision=32-true",
        ],
        cwd=clone,
        env={**running.environment(), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return clone / "outputs"


def features_table() -> str:
    """The table of what works under which strategy, from the data that the check before launch
    reads.
    """
    columns = ("single", "ddp", "shard", "context", "tensor", "pipeline", "deepspeed", "zero3")
    lines = ["| | " + " | ".join(columns) + " |", "| --- |" + " :---: |" * len(columns)]
    for feature in checks.FEATURES:
        kinds = {kind for name, kind in refused() if name == feature}
        kinds |= {"zero3"} if "deepspeed" in kinds else set()
        kinds |= {"context"} if "shard" in kinds else set()
        lines.append(
            f"| {feature} | "
            + " | ".join("–" if kind in kinds else "yes" for kind in columns)
            + " |"
        )
    return "\n".join(lines)


def test_the_table_of_features_is_the_one_that_is_enforced():
    shown = (
        (ROOT / "docs" / "strategies.md")
        .read_text()
        .split("<!-- refused: begin -->\n")[1]
        .split("\n<!-- refused: end -->")[0]
    )
    assert shown == features_table()


@pytest.mark.slow
@pytest.mark.guarantee
def test_the_module_that_is_shown_has_the_same_losses_under_every_strategy(clone):
    (module,) = (text for language, text in FENCES if language == "python")
    (clone / "src" / "mine").mkdir()
    (clone / "src" / "mine" / "module.py").write_text(module)
    configuration = next(line for line in COMMANDS if "configs/task/mine.yaml" in line)
    subprocess.run(configuration, shell=True, cwd=clone, check=True)
    commands = [words[2:] for words in TRAIN if "task=mine" in words]
    assert [" ".join(words) for words in commands] == [
        "task=mine data=digits trainer.max_epochs=5",
        "task=mine data=digits trainer.max_epochs=5 strategy=ddp trainer.devices=2",
        "task=mine data=digits trainer.max_epochs=5 strategy=fsdp trainer.devices=2",
    ]
    for i, words in enumerate(commands):
        run(clone, *words, "trainer.max_epochs=1", f"run.name=mine{i}")  # of five
    first, *others = (running.losses(clone / "outputs" / f"mine{i}") for i in range(3))
    assert len(first) > 20
    for other in others:
        assert other == pytest.approx(first, rel=1e-5)


@pytest.mark.slow
def test_the_example_learns_and_neither_the_strategy_nor_a_copy_changes_it(clone):
    commands = re.findall(
        r"^python train\.py (.*)$", section("Copy the example", OWN_PARTS), re.MULTILINE
    )
    assert commands == [
        "experiment=example",
        "experiment=example strategy=ddp trainer.devices=2",
        "experiment=example strategy=tensor trainer.devices=2",
        "experiment=moons",
    ]
    for i, command in enumerate(commands):
        run(clone, *command.split(), f"run.name={i}")
        summary = running.summary(clone / "outputs" / str(i))
        assert summary["metrics"]["test/accuracy"] > 0.95
    assert "_target_: moons.model." in (clone / "outputs" / "3" / "config.yaml").read_text()
    # later, when the loss is near zero, the order of additions shows in its fifth digit
    first = running.losses(clone / "outputs" / "0")[:40]
    assert len(first) == 40
    for i in range(1, len(commands)):
        assert running.losses(clone / "outputs" / str(i))[:40] == pytest.approx(first, rel=1e-5)


def test_every_part_of_the_example_has_an_excerpt():
    heads = {text.splitlines()[0] for language, text in EXPLAINED if language in ("python", "yaml")}
    assert heads >= {
        *(f"# src/example/{name}.py" for name in ("model", "plan", "data", "task")),
        "# configs/experiment/example.yaml",
    }


@pytest.mark.parametrize("words", TRAIN, ids=" ".join)
def test_every_command_that_trains_composes(words, clone):
    overrides = [
        word
        for word in words[words.index("train.py") + 1 :]
        if not word.startswith("-") and word != "job"
    ]
    if "-m" in words:  # a sweep's first trial
        overrides = [word.split(",")[0] for word in overrides]
    overrides = ["task=language_modeling" if word == "task=mine" else word for word in overrides]
    config.register()
    with composing(clone / "configs"):
        cfg = compose("train", overrides=[quoting.quoted(override) for override in overrides])
    assert cfg.model._target_


@pytest.mark.guarantee
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


def test_every_path_that_the_librarys_readme_names_exists():
    spans = re.findall(r"`([\w./*-]+(?:\.py|\.yaml|/))`", LIBRARY)
    assert len(set(spans)) > 30
    here = ROOT / "src" / "armature"
    own = [
        folder for folder in ROOT.iterdir() if not folder.name.startswith((".", "outputs"))
    ]  # no environments
    files = [path for folder in own for path in (folder, *folder.rglob("*"))]
    for span in set(spans):
        assert any(path.match(span) for path in files), span
    for path in (
        folder for folder in here.iterdir() if folder.is_dir() and folder.name != "__pycache__"
    ):
        assert f"`{path.name}/`" in LIBRARY, (
            f"src/armature/README.md does not say what {path.name}/ is for"
        )


def test_every_module_that_a_page_runs_exists():
    pages = [README, *(path.read_text() for path in (ROOT / "docs").glob("*.md"))]
    for name in {
        name
        for page in pages
        for name in re.findall(r"python -m ((?:benchmarks|tests)[\w.]*)", page)
    }:
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


def test_every_image_exists_for_light_and_dark_pages_and_asks_for_nothing():
    shown = re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert len(shown) >= 6
    for name in shown:
        other = (
            name.replace("-light.", "-dark.")
            if "-light." in name
            else name.replace("-dark.", "-light.")
        )
        assert other in shown
        text = (ROOT / name).read_text()
        assert text.startswith("<svg")
        assert not re.search(r"(?:href|src|url)\W{1,3}https?:", text), name
