"""The README's example of a model, a data set and an experiment of one's own is run as it stands."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from armature.validation import parallelism as checks
from tests import running
from tests.features import refused

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the template with the files that the README tells to write."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("configs", "src"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(ROOT / "train.py", folder)
    blocks = re.findall(
        r"```(?:python|yaml)\n((?:# @.*\n)?# ((?:src|configs)/[\w/.]+\.\w+).*?)```",
        (ROOT / "README.md").read_text(),
        re.DOTALL,
    )
    assert len(blocks) == 7
    for text, name in blocks:  # whole, as one would copy them
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def run(clone: Path, *overrides: str) -> Path:
    result = subprocess.run(
        [
            sys.executable,
            "train.py",
            "experiment=moons",
            "logger=none",
            "trainer.accelerator=cpu",
            "trainer.precision=32-true",
            *overrides,
        ],
        cwd=clone,
        env={**running.environment(), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return clone / "outputs"


def features_table() -> str:
    """What works under which strategy, from the very data that the check before launch reads."""
    columns = ("single", "ddp", "shard", "tensor", "pipeline", "deepspeed", "zero3")
    lines = ["| | " + " | ".join(columns) + " |", "| --- |" + " :---: |" * len(columns)]
    for feature in checks.FEATURES:
        kinds = {kind for name, kind in refused() if name == feature}
        kinds |= {"zero3"} if "deepspeed" in kinds else set()
        lines.append(f"| {feature} | " + " | ".join("–" if kind in kinds else "yes" for kind in columns) + " |")
    return "\n".join(lines)


def test_the_table_of_features_is_the_one_that_is_enforced():
    text = (ROOT / "README.md").read_text()
    shown = text.split("<!-- refused: begin -->\n")[1].split("\n<!-- refused: end -->")[0]
    assert shown == features_table()


@pytest.mark.slow
def test_the_example_learns_and_the_strategy_does_not_change_it(clone):
    outputs = run(clone, "run.name=one")
    run(clone, "run.name=two", "strategy=ddp", "trainer.devices=2")
    run(clone, "run.name=three", "strategy=tensor", "trainer.devices=2")
    summary = running.summary(outputs / "one")
    assert summary["metrics"]["test/accuracy"] > 0.95
    # later, when the loss is near zero, the order of additions shows in its fifth digit
    for name in ("two", "three"):
        assert running.losses(outputs / name)[:40] == pytest.approx(running.losses(outputs / "one")[:40], rel=1e-5)


def test_every_make_target_that_the_readme_names_exists():
    named = set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text()))
    listed = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, env=dict(os.environ)
    ).stdout
    assert named - set(re.findall(r"make ([a-z-]+)", listed)) <= {"your"}
