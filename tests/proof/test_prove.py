"""scripts/prove.py: sound code passes, and each planted leak is named where it is."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import prove
from tests import running
from tests.sampled import sampled

CONFIGS = Path(__file__).parent / "configs"
BASE = [
    "--config-dir",
    str(CONFIGS),
    "--steps",
    "4",
    "task=planted",
    "data=planted",
    "trainer.accelerator=cpu",
    "launch.allowed_packages=[armature,torch.nn,torch.optim,lightning.pytorch,tests]",
]

UNSYNCHRONIZED = ("strategy=ddp", "trainer.devices=2", "strategy.sync_batchnorm=false")


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Call scripts/prove.py in this process, its runs in forks; return exit code and output."""

    def run(command, *, stdout, **_):
        ranks = next((w.partition("=")[2] for w in command if w.startswith("trainer.devices=")), 1)
        env = running.environment(PYTHONPATH=running.PYTHONPATH)
        python, _, _, _, *words = command  # -P -c "…"
        command = [python, str(running.ROOT / "train.py"), *words]
        done = running.run(command, cwd=tmp_path, env=env, ranks=int(ranks))
        stdout.write(done.stdout + done.stderr)
        return done

    def main(*arguments: str) -> tuple[int | str | None, str]:
        monkeypatch.setattr(sys, "argv", ["prove.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            prove.main()
        captured = capsys.readouterr()
        return ended.value.code, captured.out + captured.err

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prove, "subprocess", SimpleNamespace(run=run, STDOUT=subprocess.STDOUT))
    return main


@pytest.mark.slow
@pytest.mark.guarantee
def test_a_plain_module_is_proved_under_stops_and_layouts(call, tmp_path):
    code, printed = call("--layouts", "ddp:2,fsdp:2", *BASE, "run.name=mine")
    assert code == 0, printed
    assert "run.name=mine: not used, since this script decides that" in printed
    assert re.search(r"single 1, stopped at 2 +equal +equal +equal +equal +equal +equal", printed)
    assert re.search(r"single 1, killed at 3 +equal +equal +equal +equal +equal +equal", printed)
    assert "own: own_loss, train/loss_step: logged without sync_dist=True" in printed
    assert printed.endswith("proved\n")
    assert list((tmp_path / "outputs").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leak", "words", "where", "cause"),
    [
        pytest.param(
            "DrawsItsOwn",
            ["--layouts", "none"],
            r"single 1, stopped at 2: step 3: the input of net \(Sequential\), which training_step",
            r"something that no checkpoint holds: a draw from a generator of its own",
            marks=pytest.mark.guarantee,
        ),
        (
            "Iterates",
            ["--layouts", "none"],
            r"single 1, stopped at 2: step 3: the loss, which training_step computes",
            r"something that no checkpoint holds: a draw from a generator of its own, the",
        ),
        pytest.param(
            "OwnValue",
            ["--layouts", "ddp:2"],
            r"ddp 2: step 1: the loss, which training_step computes from outputs that agree",
            r"a value of this rank's batch alone",
            marks=pytest.mark.guarantee,
        ),
        (
            "MeanOfMeans",
            ["--layouts", "ddp:2"],
            r"ddp 2: step \d: the loss, which training_step computes from outputs that agree",
            r"a mean of means: the parts of the batch count \d, \d targets",
        ),
        (
            "Sound",
            ["--layouts", "none", *UNSYNCHRONIZED],
            r"ddp 2 as typed: step 1: the output of net\.1 \(BatchNorm1d\); its input agrees",
            r"BatchNorm computes its statistics over a part of the batch\. Type strategy\.sync",
        ),
    ],
)
def test_a_planted_leak_is_named_where_it_is(call, leak, words, where, cause):
    code, printed = call(*words, *BASE, f"task._target_=tests.proof.parts.{leak}")
    assert code == 1, printed
    assert re.search(where, printed), printed
    assert re.search(f"likely cause: {cause}", printed), printed


@pytest.mark.slow
def test_dropout_is_an_exception_of_layouts(call):
    words = ["--layouts", "ddp:2", "task._target_=tests.proof.parts.Dropped"]
    code, printed = call(*words, *BASE)
    assert code == 0, printed
    assert "the output of net.3 (Dropout); its input agrees" in printed
    assert "docs/contract.md names this exception" in printed


@pytest.mark.slow
def test_a_finished_run_is_compared_with_the_same_command_now(call, tmp_path):
    assert call("--keep", "--layouts", "none", *BASE)[0] == 0
    (folder,) = (tmp_path / "outputs").iterdir()
    against = [*BASE[:2], "--against", str(folder / "straight")]
    code, printed = call("--steps", "3", *against)
    assert code == 0, printed
    assert "both agree within 1e-05" in printed
    leak = "task._target_=tests.proof.parts.OwnValue"
    code, printed = call(*against, leak)
    assert code == 1, printed
    assert "differs first at step 1, train/" in printed
    assert "step 1: the loss, which training_step computes from outputs that agree" in printed


@pytest.mark.parametrize(
    ("words", "text"),
    sampled(
        [
            (["experiment=digit"], "Did you mean 'digits'?"),
            (["--steps", "2", "experiment=example"], "--steps 2: type at least 4"),
            (["--layouts", "fspd:2", "experiment=example"], "Did you mean 'fsdp'?"),
            (
                ["--layouts", "context:2", "experiment=example"],
                "--layouts context:2: strategy.context",
            ),
            (["--layouts", "ddp:many", "experiment=example"], "type a whole number from 1"),
            (["--against", "outputs/none"], "--against outputs/none: there is no overrides.txt"),
        ],
        2,
    ),
)
def test_a_mistake_gets_one_message_before_any_run(call, tmp_path, words, text):
    code, printed = call(*words)
    assert code == 2
    assert text in printed
    assert printed.count("problem:") == 1
    assert not (tmp_path / "outputs").exists()
