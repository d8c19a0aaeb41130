"""What a stranger's file or configuration cannot do, and where a secret is never written."""

import io
import json
import pickle
import shutil
import zlib
from pathlib import Path

import pytest
import torch
import yaml

from tests import running
from tests.guarantees.runs import BASE, PACKAGES, of_example, of_user

pytestmark = [pytest.mark.guarantee, pytest.mark.slow]
EXIT_REFUSED = 2
SECRET = "m4rk3r-0f-4-s3cr3t"


class Code:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.fixture
def run_dir(runs, tmp_path):
    """A copy of a finished run that can go on, and whose last checkpoint is its only one."""
    copy = Path(shutil.copytree(runs.straight(of_user("Plain")), tmp_path / "outputs" / "mine"))
    *others, _ = sorted(copy.glob("checkpoints/step=*"))
    for each in others:
        shutil.rmtree(each)
    return copy


def call(script, *words, cwd, code: int | None = EXIT_REFUSED, **environment):
    return running.call(
        script, *words, cwd=cwd, code=code, PYTHONPATH=running.PYTHONPATH, **environment
    )


def vouch(checkpoint: Path) -> None:
    """Make the manifest agree with the files, as one who wants to deceive would."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        content = (checkpoint / name).read_bytes()
        entry.update(bytes=len(content), crc32=zlib.crc32(content))
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("zipped", [False, True], ids=["pickle", "torch.save"])
def test_no_file_of_a_checkpoint_runs_code(number, zipped, run_dir, tmp_path):
    (checkpoint,) = run_dir.glob("checkpoints/step=*")
    names = sorted(json.loads((checkpoint / "manifest.json").read_text())["files"])
    assert len(names) == 3
    code, file = Code(tmp_path / "ran"), checkpoint / names[number]
    if zipped:
        content = io.BytesIO()
        torch.save({"state": code}, content)
        file.write_bytes(content.getvalue())
    else:
        file.write_bytes(pickle.dumps(code))
    vouch(checkpoint)
    more = [*BASE, *of_user("Plain"), f"run.root={run_dir.parent}", f"run.name={run_dir.name}"]
    for script, *arguments in (
        ("train.py", *more, "trainer.max_steps=14"),
        ("scripts/evaluate.py", run_dir, PACKAGES),
        ("scripts/predict.py", run_dir, "out=rows.csv", PACKAGES),
        ("scripts/convert.py", run_dir, tmp_path / "x.safetensors"),
    ):
        done = call(script, *arguments, cwd=tmp_path, code=None)
        if (script, done.returncode) == ("scripts/convert.py", 0):
            continue  # it has not read this file
        assert done.returncode == EXIT_REFUSED, f"{script}: {done.stderr[-2000:]}"
        assert checkpoint.name in done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_ckpt_that_is_no_tensors_runs_no_code(tmp_path):
    torch.save({"state_dict": {}, "hyper_parameters": Code(tmp_path / "ran")}, tmp_path / "x.ckpt")
    words = [*BASE, *of_user("Plain"), "resume=x.ckpt", "run.name=mine"]
    for script, *arguments in (
        ("train.py", *words),
        ("scripts/convert.py", "x.ckpt", "outputs/x/checkpoints/step=000000"),
    ):
        assert "x.ckpt: refused" in call(script, *arguments, cwd=tmp_path).stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "target", ["os.mkdir", "pathlib.Path.mkdir", "torch.load", "builtins.eval"]
)
def test_a_configuration_names_no_other_code(target, tmp_path):
    words = [*BASE, *of_example(), "run.name=mine"]
    done = call("train.py", *words, f"+callbacks.x={{_target_:{target},path:owned}}", cwd=tmp_path)
    assert f"callbacks.x._target_={target}" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_a_stranger_names_no_other_code(run_dir, tmp_path):
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    config["data"] = {"_target_": "os.mkdir", "path": "owned"}
    config["launch"]["allowed_packages"] = ["os", "armature", "tests"]
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    for script, *arguments in (
        ("scripts/evaluate.py", run_dir),
        ("scripts/predict.py", run_dir, "out=rows.csv"),
    ):
        assert "os.mkdir" in call(script, *arguments, cwd=tmp_path).stderr
    assert not (tmp_path / "owned").exists()


def test_a_value_of_the_environment_is_written_nowhere(tmp_path):
    words = [*BASE, *of_example(), "logger=tensorboard", "run.name=mine", "trainer.max_steps=3"]
    words += ["run.notes=${oc.env:MY_TOKEN}", "run.tags=[a,'${oc.env:MY_TOKEN}']"]
    done = call("train.py", *words, cwd=tmp_path, code=0, MY_TOKEN=SECRET)
    assert SECRET not in done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 6
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert "${oc.env:MY_TOKEN}" in (tmp_path / "outputs/mine/config.yaml").read_text()


def test_a_typed_secret_is_refused_and_not_repeated(tmp_path):
    words = [*BASE, *of_example(), "run.name=mine", f"+callbacks.x.api_key={SECRET}"]
    done = call("train.py", *words, cwd=tmp_path)
    assert "callbacks.x.api_key" in done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
