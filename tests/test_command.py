"""The command `armature`, in projects that have no file of this repository."""

import shutil
import sys
import zipfile

import pytest

from tests.running import ROOT, environment, losses, run

COMMAND = [sys.executable, "-m", "armature.command"]


def call(*words, cwd, code=0, command=COMMAND):
    env = environment(PYTHONPATH=str(ROOT / "src"))
    env.pop("ARMATURE_PROJECT", None)
    result = run([*command, *map(str, words)], cwd=cwd, env=env, timeout=280, fork=False)
    assert result.returncode == code, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def moons(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere")
    assert "next: cd parish && make train" in call("new", "parish", cwd=folder)
    return folder / "parish"


def test_a_new_project_has_few_files_and_no_word_of_the_example(moons):
    files = [path for path in moons.rglob("*") if path.is_file()]
    assert len([path for path in files if path.suffix != ".json"]) == 17
    assert len(files) <= 40
    texts = [path.read_text() for path in files if path.suffix not in (".json", ".yaml")]
    assert not [text for text in texts if "experiment=example" in text]
    makefile = (moons / "Makefile").read_text()
    assert "\ntrain:" in makefile
    assert "\ntest:" in makefile


def test_its_own_files_come_first_then_the_shipped_ones(moons):
    help_text = call("train", "--help", cwd=moons)
    assert "parish parity" in help_text
    assert "llama3_8b" in help_text
    assert "width: 32" in call("train", "--cfg", "job", "--package", "model", cwd=moons)
    assert call("copy", "model/gpt_nano", cwd=moons).strip().endswith("configs/model/gpt_nano.yaml")
    file = moons / "configs" / "model" / "gpt_nano.yaml"
    file.write_text(file.read_text().replace("width: 256", "width: 96"))
    words = ("--cfg", "job", "--package", "model", "model=gpt_nano")
    assert "width: 96" in call("train", *words, cwd=moons)
    assert "exists already" in call("copy", "model/gpt_nano", cwd=moons, code=2)
    file.unlink()
    assert "Options of model: " in call("copy", "model/gpt_nanoo", cwd=moons, code=2)
    assert "type GROUP/NAME" in call("copy", cwd=moons, code=2)


def test_mistakes_are_answered_as_in_a_clone(moons):
    said = call("train", "model.witdh=3", "modle=x", "strategy=fsdpp", cwd=moons, code=2)
    assert "3 problems:" in said
    assert "Did you mean 'model.width'?" in said
    assert "strategy has no option 'fsdpp'" in said
    assert "there is no such command. Type train, copy, " in call("trian", cwd=moons, code=2)
    assert "nowhere: no such path." in call("evaluate", "nowhere", cwd=moons, code=2)
    assert "src/parish" in call("new", "parish", cwd=moons, code=2)


@pytest.mark.slow
def test_it_trains_resumes_is_evaluated_and_swept(moons):
    fixed = ("trainer.accelerator=cpu", "trainer.precision=32-true", "logger=none")
    for epochs in (1, 2):  # the second start resumes
        words = ("run.name=a", f"trainer.max_epochs={epochs}", "strategy=ddp", "trainer.devices=2")
        said = call("train", *fixed, *words, cwd=moons)
    assert "next: armature evaluate outputs/a" in said
    assert len(losses(moons / "outputs" / "a")) == 50
    assert "test/accuracy" in call("evaluate", "outputs/a", "--accelerator", "cpu", cwd=moons)
    python = ["env", "ARMATURE_PROJECT=.", sys.executable, "-c"]  # as in a notebook
    call("import armature; armature.load('outputs/a')", cwd=moons, command=python)
    for parallel in (1, 2):
        words = ("run.name=s", "trainer.max_epochs=1", "seed=0,1", f"sweep.parallel={parallel}")
        assert "best: " in call("train", "-m", *fixed, *words, cwd=moons)


@pytest.mark.slow
def test_a_wheel_has_the_configs_and_the_scripts(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("configs", "scripts", "src"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for pattern in ("*.toml", "*.txt", "*.md", "setup.py"):
        for path in ROOT.glob(pattern):
            shutil.copy(path, tmp_path)
    (tmp_path / "configs" / "local" / "default.yaml").write_text("{}\n")
    build = "from setuptools.build_meta import *; build_wheel('.'); build_editable('.')"
    call(build, cwd=tmp_path, command=[sys.executable, "-c"])
    editable, names = (
        set(zipfile.ZipFile(wheel).namelist()) for wheel in sorted(tmp_path.glob("*.whl"))
    )
    shipped = [*(ROOT / "configs").rglob("*"), *(ROOT / "scripts").rglob("*.py")]
    wanted = {f"armature/{path.relative_to(ROOT)}" for path in shipped if path.is_file()}
    wanted -= {"armature/configs/local/default.yaml"}
    wanted |= {f"armature/scripts/project/{name}" for name in (".gitignore", "Makefile")}
    wanted |= {"armature/pages/page.css", "armature/data/digits.csv.gz", "example/model.py"}
    assert wanted <= names
    assert "armature/configs/local/default.yaml" not in names
    # a path to src/, not a finder, which a folder of the same name would precede
    assert "finder" not in str(editable)
