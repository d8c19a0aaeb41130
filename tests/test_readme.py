"""What README.md shows works as it is written, and src/armature/README.md names files that exist.

tests/test_docs.py checks links, paths and commands of all documents.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import running
from tests.features import KINDS, TYPED, refused

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
LIBRARY = (ROOT / "src" / "armature" / "README.md").read_text()
FENCES = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.guarantee
def test_the_module_that_is_shown_has_the_same_losses_under_every_strategy(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "mine*")  # a user's own
    for name in ("configs", "src"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "train.py", tmp_path)
    (module,) = (text for language, text in FENCES if language == "python")
    (tmp_path / "src" / "mine").mkdir()
    (tmp_path / "src" / "mine" / "module.py").write_text(module)
    (lines,) = (text.splitlines() for _, text in FENCES if "configs/task/mine.yaml" in text)
    subprocess.run(lines[0], shell=True, cwd=tmp_path, check=True)
    commands = [shlex.split(line, comments=True)[1:] for line in lines if "task=mine" in line]
    assert [words[4:] for words in commands] == [
        [],
        ["strategy=ddp", "trainer.devices=2"],
        ["strategy=fsdp", "trainer.devices=2"],
    ]
    fixed = ["logger=none", "trainer.accelerator=cpu", "trainer.precision=32-true"]
    for i, words in enumerate(commands):
        result = running.run(
            [sys.executable, *words, *fixed, "trainer.max_epochs=1", f"run.name={i}"],  # of five
            cwd=tmp_path,
            env=running.environment(PYTHONPATH=""),
            fork=False,
        )
        assert result.returncode == 0, result.stderr
    first, *others = (running.losses(tmp_path / "outputs" / str(i)) for i in range(3))
    assert len(first) > 20
    for other in others:
        assert other == pytest.approx(first, rel=1e-5)


@pytest.mark.guarantee
def test_a_mistake_is_reported_in_the_words_that_are_shown(tmp_path):
    (shown,) = (text for _, text in FENCES if text.startswith("$ python train.py"))
    command, *expected = shown.splitlines()
    result = running.call("train.py", *command.split()[3:], cwd=tmp_path, code=2)
    for line, printed in zip(expected, result.stderr.strip().splitlines(), strict=True):
        assert printed.startswith(line.removesuffix("…"))


def test_the_table_of_features_is_the_one_that_is_enforced():
    page = (ROOT / "docs" / "strategies.md").read_text()
    shown = page.partition("<!-- refused: begin -->\n")[2].partition("\n<!-- refused: end -->")[0]
    lines = ["| | " + " | ".join(KINDS) + " |", "| --- |" + " :---: |" * len(KINDS)]
    for feature in TYPED:
        kinds = {*refused(feature)}
        kinds |= {"zero3"} if "deepspeed" in kinds else set()
        kinds |= {"context"} if "shard" in kinds else set()
        cells = " | ".join("–" if kind in kinds else "yes" for kind in KINDS)
        lines.append(f"| {feature} | {cells} |")
    assert shown == "\n".join(lines)


def test_every_path_that_the_librarys_readme_names_exists():
    spans = set(re.findall(r"`([\w./*-]+(?:\.py|\.yaml|/))`", LIBRARY))
    assert len(spans) > 30
    for span in spans:
        patterns = (f"src/armature/{span}", f"src/armature/models/*/{span}", f"src/{span}", span)
        assert any(list(ROOT.glob(pattern.rstrip("/"))) for pattern in patterns), span
    for path in (ROOT / "src" / "armature").glob("*/__init__.py"):
        assert f"`{path.parent.name}/`" in LIBRARY, (
            f"src/armature/README.md does not say what {path.parent.name}/ is for"
        )


def test_every_image_exists_for_light_and_dark_pages_and_asks_for_nothing():
    shown = re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert len(shown) >= 6
    for name in shown:
        assert name.replace("-light.", "-dark.") in shown
        text = (ROOT / name).read_text()
        assert text.startswith("<svg")
        assert not re.search(r"(?:href|src|url)\W{1,3}https?:", text), name
