"""A mistake gets one clear message and exit code 2, with no traceback, before any process
starts.
"""

import json
import os
import time
from pathlib import Path

import pytest

from armature.validation.checks import check
from armature.validation.compose import explain, explain_sweep, searching
from tests import running
from tests.in_process import problems_of
from tests.sampled import sampled

ROOT = Path(__file__).parents[1]


def refused(typed: list[str], *words: str, cwd: Path, **environment: str) -> str:
    """Return what train.py answers to what is typed."""
    environment["ARMATURE_CACHE"] = str(cwd / "cache")
    stderr = running.call("train.py", *typed, cwd=cwd, code=2, **environment).stderr
    assert "Traceback" not in stderr
    assert [word for word in words if word not in stderr] == [], stderr
    return stderr


CASES = {
    "added key": (["+model.dept=3"], ["model.dept", "takes no argument"]),
    "a nameless callback": (["+callbacks._target_=a.B"], ["is no NAME: {_target_: package.Cl"]),
    "not key=value": (["trainer.devices"], ["key=value"]),
    "no end": (["trainer.max_steps=null", "trainer.max_epochs=null"], ["trainer.max_steps"]),
    "batch that does not divide": (
        ["data.global_batch_size=30", "data.micro_batch_size=8"],
        ["data.global_batch_size=30", "data.micro_batch_size=8", "32"],
    ),
    "no such table": (
        ["data=table", "data.path=no.csv", "data.target=y", "task=example", "model=example"],
        ["no.csv"],
    ),
    "field that is not there": (
        ["data=text", "data.path=lines.jsonl", "data.source.field=body"],
        ["body", "text"],
    ),
    "context longer than the corpus": (
        ["data=text", "data.path=long.txt", "data.source.vocab_size=300", "data.context=65536"],
        ["data.context=65536", "is longer"],
    ),
    "a required value": (["data=text"], ["data.path"]),
    "wandb without a key": (["logger=wandb"], ["WANDB_API_KEY", "logger.wandb.offline=true"]),
    "target outside the allowed packages": (
        ["model._target_=os.system"],
        ["os.system", "launch.allowed_packages"],
    ),
    "Lightning by its other package": (
        ["callbacks=ema", "+callbacks.stop._target_=pytorch_lightning.callbacks.Timer"],
        ["callbacks.stop._target_=lightning.pytorch.callbacks.Timer"],
    ),
    "secret on the command line": (["+logger.tensorboard.api_key=abcdef"], ["api_key", "oc.env"]),
    "resume from nowhere": (["resume=nowhere"], ["resume=nowhere"]),
    "output folder that is a file": (["run.root=short.txt"], ["run.root=short.txt"]),
    "model and task that do not go together": (
        ["model=vit_tiny"],
        ["task=", "image_classification"],
    ),
    "a sweep without -m": (["seed=0,1"], ["seed=0,1", "Type -m"]),
    "an object store nobody knows": (
        ["checkpoint.root=s4://bucket"],
        ["checkpoint.root=s4://bucket: ", "s4"],
    ),
    "a key that another option has": (["data.path=long.txt"], ["it belongs to data=chat, "]),
    "a size of an image model": (
        ["experiment=digits", "model.patch_size=3"],
        ["model.patch_size=3 does not divide model.image_size=8: model.patch_size=2 does"],
    ),
    "an option of several": (["callbacks=[ema,nope]"], ["callbacks has no option 'nope'."]),
    "an argument that no file names": (
        ["optimizer=sgd", "optimizer.maximize=true"],
        ["torch.optim.SGD takes it. Type +optimizer.maximize=true."],
    ),
    "nothing to go on from": (
        [
            "data=text",
            "data.path=long.txt",
            "data.source.vocab_size=300",
            "data.context=8",
            "resume=required",
            "run.name=new",
        ],
        ["resume=required", "no complete checkpoint"],
    ),
    "a device's file": (
        ["hardware=h100_80gb"],
        ["hardware=h100_80gb: it is for scripts/plan.py", "trainer.devices=N"],
    ),
    "a run outside of run.root": (
        ["run.name=../../elsewhere"],
        ["run.name=../../elsewhere", "below run.root"],
    ),
    "a callback without its plus": (
        ["callbacks.mine._target_=a.B"],
        ["type +callbacks.mine._target_=a.B"],
    ),
    "a value of a sweep": (
        [
            "-m",
            "data=text",
            "data.path=long.txt",
            "data.source.vocab_size=300",
            "data.context=8",
            "optimizer.lr=1,-1",
        ],
        ["1 problem:", "optimizer.lr=-1: must be a number above 0"],
    ),
    "a folder that is not there": (
        ["--config-dir", "none"],
        ["--config-dir none: there is no such folder"],
    ),
    "an option in a sweep": (
        ["-m", "strategy=dpd,FSPD"],
        ["strategy has no option 'FSPD'. Did you mean 'fsdp'?"],
    ),
    "a launcher nobody knows": (
        ["-m", "seed=0,1", "hydra/launcher=nope"],
        ["1 problem:", "hydra/launcher/nope"],
    ),
    "more GPUs than there are": (["trainer.accelerator=gpu", "trainer.devices=99"], ["trainer."]),
    "beside a sweep": (["-m", "seed=0,1", "model.heads=3"], ["1 problem:", "model.heads=3"]),
    "beside groups that the task does not take": (
        [
            *("--config-dir", str(ROOT / "tests" / "plain_configs")),
            *("experiment=plain", "data=digits", "trainer.max_steps=-1"),
        ],
        ["1 problem:", "trainer.max_steps=-1"],
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad_input")
    (folder / "empty.txt").touch()
    (folder / "binary.bin").write_bytes(bytes(range(256)) * 40)
    (folder / "short.txt").write_text("a short text\n" * 8)
    (folder / "long.txt").write_text(
        "".join(f"line {i} of a text that is long enough to split\n" for i in range(600))
    )
    (folder / "lines.jsonl").write_text(
        "".join(json.dumps({"text": "a line"}) + "\n" for _ in range(9))
    )
    return folder


# what only the command itself finds: sweeps, Hydra's own options, what follows composing
COMMANDS = (
    "nothing to go on from",
    "a value of a sweep",
    "a folder that is not there",
    "a launcher nobody knows",
    "beside groups that the task does not take",
)
SWEEPS = [name for name, (words, _) in CASES.items() if "-m" in words and name not in COMMANDS]


@pytest.mark.parametrize("name", sampled(SWEEPS, 2))
def test_a_mistake_in_a_sweep_is_found(name):
    overrides, words = CASES[name]
    problems = explain_sweep(overrides[1:], check)
    shown = f"{len(problems)} problem: " + " ".join(problems)
    assert all(word in shown for word in words), problems


@pytest.mark.parametrize(
    "name",
    sampled([n for n in CASES if n not in (*COMMANDS, *SWEEPS)], 12, guarantee=True),
)
def test_a_mistake_is_found(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("ARMATURE_CACHE", str(folder / "cache"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    overrides, words = CASES[name]
    problems = problems_of(*overrides, prepare=True)
    assert all(word in "\n".join(problems) for word in words), problems


@pytest.mark.guarantee
@pytest.mark.parametrize("name", COMMANDS)
def test_a_mistake_is_refused(name, folder):
    overrides, words = CASES[name]
    refused(overrides, *words, cwd=folder, HOME=str(folder))
    assert not (folder / "outputs").exists()


def test_trials_that_run_elsewhere_are_not_held_against_this_machine(monkeypatch):
    from armature.validation import compose as module

    def elsewhere(overrides):
        fixed, values, here = usual(overrides)
        assert here
        return fixed, values, False

    usual = module._sweep
    overrides = ["seed=0,1", "trainer.accelerator=gpu", "trainer.devices=99"]
    assert "99" in " ".join(module.explain_sweep(overrides, check))
    monkeypatch.setattr(module, "_sweep", elsewhere)
    assert module.explain_sweep(overrides, check) == []
    assert module.explain_sweep(["seed=0,no"], check)


@pytest.mark.guarantee
@pytest.mark.parametrize(
    "typed",
    [
        "trainer.devces=2 strategy=dpp trainer.max_steps=many optimizer.lr=-1",
        "trainer.precision=bf16 +model.dept=3 resume=nowhere logger=wandb",
    ],
)
def test_several_mistakes_are_told_together(typed, folder):
    words = [each.lstrip("+").partition("=")[0] for each in typed.split()]
    refused(typed.split(), "4 problems", *words, cwd=folder, HOME=str(folder))


FILES = {
    "seed: 1\n": "its first line must be '# @package _global_', and is 'seed: 1'",
    "# @package _global_\ndefaults: [override /model: gpt_nan]\n": "no 'model/gpt_nan'. Did you "
    "mean 'gpt_nano'?",
    "# @package _global_\ntags: a\ntrainer: {min_epochs: 3, max_stps: 3}\n": (
        "there is no key 'tags'. Type run.tags=a. And there is no key 'trainer.min_epochs'. "
        "Type trainer.max_steps=… or trainer.max_epochs=…, and callbacks=early_stopping to end "
        "earlier. And there is no key 'trainer.max_stps'. Did you mean 'trainer.max_steps'?"
    ),
    "# @package _global_\nmodel: gpt_nano\ntrainer.max_steps: 5\n": (
        "model: it is gpt_nano, where keys belong. Write KEY: VALUE below model:, or '- override "
        "/model: NAME' in its defaults list. And trainer.max_steps: a file has no dotted keys. "
        "Write max_steps: below trainer:."
    ),
    "# @package _global_\nrun: {name: caf\udce9}\n": "it is not UTF-8 text (byte 35). Save it as",
    "# @package _global_\ndefaults: [model: example]\n": "Write '- override /model: example'.",
    "# @package _global_\ndefaults: [override model: example]\n": "as in '- override /model: "
    "example'.",
    "# @package _global_\nseed: [\n": "node content",
    "# @package _global_\nseed: many\n": "seed=many: must be a whole number from 0 to",
}


@pytest.fixture
def own(tmp_path):
    """Writes an experiment into a folder of configurations, and returns the folder."""

    def write(text: str) -> Path:
        (tmp_path / "own" / "experiment").mkdir(parents=True)
        written = text.encode(errors="surrogateescape")  # "\udce9" is é in Latin-1
        (tmp_path / "own" / "experiment" / "lone.yaml").write_bytes(written)
        return tmp_path / "own"

    return write


@pytest.mark.parametrize("text", sampled(FILES, 3))
def test_a_mistake_in_an_option_s_file_is_told_as_what_it_is(own, text):
    (problem,) = explain(Exception(), [searching(own(text)), "experiment=lone"])
    assert problem.startswith("experiment=lone: in own/experiment/lone.yaml: ")
    assert FILES[text] in problem


def test_a_mistake_in_a_file_of_another_folder_is_told_as_what_it_is(own, folder):
    configs = own("# @package _global_\ntrainer: {max_stps: 3}\n")
    (configs / "mine").symlink_to("experiment")  # a group that no configuration has
    near, of_group = explain(Exception(), [searching(configs), "experiment=lane", "+mine=lone"])
    assert "Did you mean 'lone'?" in near
    assert of_group.endswith("in own/mine/lone.yaml: there is no key 'mine'.")
    refused(
        ["--config-dir", str(configs), "experiment=lone"],
        "experiment=lone: in own/experiment/lone.yaml: there is no key 'trainer.max_stps'. "
        "Did you mean 'trainer.max_steps'?",
        cwd=folder,
    )


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_output_folder(tmp_path):
    tmp_path.chmod(0o500)
    refused([f"run.root={tmp_path}/outputs"], "cannot be written", cwd=ROOT)


@pytest.mark.guarantee
def test_a_mistake_is_answered_without_importing_torch(folder):
    code = (
        "import sys, runpy; sys.argv = ['train.py', 'trainer.devces=2']\ntry: "
        f"runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')\nexcept SystemExit as e: "
        "assert e.code == 2, e.code\nassert 'torch' not in sys.modules and 'lightning' not in "
        "sys.modules and 'numpy' not in sys.modules"
    )
    started = time.perf_counter()
    running.python("-c", code, cwd=folder)
    assert time.perf_counter() - started < 30  # a hang, not a benchmark
