"""scripts/new.py: what it writes passes the checks and its own test, and what it refuses."""

import re
import shutil

import pytest

from armature.errors import ConfigError
from tests import in_process
from tests.running import ROOT, python

new = in_process.load("new")


def test_it_copies_every_file_of_the_example_under_the_name():
    texts = {str(path.relative_to(ROOT)): text for path, text in new.texts("half_moons").items()}
    sources = {f"src/half_moons/{path.name}" for path in (ROOT / "src" / "example").glob("*.py")}
    configs = {
        f"configs/{group}/half_moons.yaml" for group in ("model", "data", "task", "experiment")
    }
    assert set(texts) == {*sources, *configs, "tests/test_half_moons.py"}
    assert not [path for path, text in texts.items() if "example" in text]
    assert "_target_: half_moons.model.ResidualMLP" in texts["configs/model/half_moons.yaml"]


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "a word of Python": ("class", "must be a name that Python can import"),
        "no identifier": ("my-moons", "must be a name that Python can import"),
        "capitals": ("Moons", "must be a name that Python can import"),
        "ours": ("example", "src/example, configs/model/example.yaml, .* exists already"),
        "a config of ours": ("digits", "configs/data/digits.yaml, .* exists already"),
        "a test of ours": ("muon", "tests/optim/test_muon.py exists already"),
        "a module of Python": ("json", "import json finds another package"),
        "a package": ("torch", "import torch finds another package"),
        "a folder of ours": ("benchmarks", "import benchmarks finds another package"),
    }.values(),
    ids=lambda value: value.split()[0],
)
def test_names_that_would_not_work_are_refused(name, expected):
    with pytest.raises(ConfigError, match=expected):
        new.texts(name)


def test_a_deleted_example_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(new, "SHIPPED", tmp_path)
    with pytest.raises(ConfigError, match=r"stars: .*model/example.yaml.* is gone"):
        new.texts("stars")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_clone_with_a_model_and_a_name_of_its_own_passes_its_checks(tmp_path):
    own = ("moons", "moons.yaml", "test_moons.py")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", *own)
    for name in ("benchmarks", "configs", "docs", "scripts", "src", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("train.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    made = python("scripts/new.py", "moons", cwd=tmp_path)
    assert "python train.py experiment=moons" in made.stdout
    train = tmp_path / "configs" / "train.yaml"
    train.write_text(
        re.sub(r"(?m)^project:\n  name: \S+", "project:\n  name: mine", train.read_text())
    )
    assert "name: mine" in train.read_text()
    python("-m", "ruff", "check", "--no-cache", ".", cwd=tmp_path)
    python("-m", "ruff", "format", "--check", "--no-cache", ".", cwd=tmp_path)
    data = (
        tmp_path / "src" / "moons" / "data.py"
    )  # reads a file of the clone by a relative path, as a user's data do
    line = "super().__init__()\n"
    data.write_text(data.read_text().replace(line, f'{line}        open("README.md").close()\n'))
    assert "README.md" in data.read_text()
    python("-m", "pytest", "-p", "no:cacheprovider", "tests/test_moons.py", cwd=tmp_path)
    readers = ("test_configs.py", "test_new.py", "test_readme.py")
    chosen = ("-m", "not slow", "-k", "not misspelt", *(f"tests/{file}" for file in readers))
    python("-m", "pytest", "-p", "no:cacheprovider", *chosen, cwd=tmp_path, timeout=280)
    again = python("scripts/new.py", "moons", cwd=tmp_path, code=2)
    assert "src/moons, configs/model/moons.yaml" in again.stderr
