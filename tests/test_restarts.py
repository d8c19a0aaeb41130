"""A run is restarted when a rank is killed, hangs or fails, unless it would fail again."""

import json
import os
import re
import signal
import time
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from torch.distributed.elastic.multiprocessing.api import SignalException

from armature.errors import ConfigError, RunFailed
from armature.launcher import supervise
from armature.launcher.supervise import Failure
from armature.layout import Layout
from armature.validation import micro_batch, resize
from tests import running

pytestmark = pytest.mark.usefixtures("cache")

FAULTY = """
import os
import signal
import time
import weakref

from lightning.pytorch import Callback


class Fault(Callback):
    def __init__(self, how, step, attempts=1):
        self.how, self.step, self.attempts = how, step, attempts

    def on_train_batch_start(self, trainer, *args):
        attempt, rank = int(os.environ["ARMATURE_ATTEMPT"]), trainer.global_rank
        if attempt >= self.attempts:
            return
        if (trainer.global_step, rank) != (self.step, trainer.world_size - 1):
            return
        if self.how == "raise":
            raise ArithmeticError("the deliberate mistake")
        if self.how == "sleep":
            time.sleep(600)
        os.kill(os.getpid(), getattr(signal, self.how))
"""
DDP = [
    "strategy=ddp",
    "trainer.devices=2",
    "run.name=run",
    "trainer.max_steps=8",
    "checkpoint.every_n_steps=2",
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("undisturbed")
    running.train(*DDP, cwd=folder, corpus=corpus)
    return folder / "outputs" / "run"


def fault(how: str, *, step: int, folder, attempts: int = 1) -> list[str]:
    """Overrides for a fault of the last rank before it trains a step, in the first so many
    attempts.
    """
    (folder / "faulty").mkdir()
    (folder / "faulty" / "__init__.py").write_text(FAULTY)
    return [
        "+callbacks.fault._target_=faulty.Fault",
        f"+callbacks.fault.how={how}",
        f"+callbacks.fault.step={step}",
        f"+callbacks.fault.attempts={attempts}",
        "launch.allowed_packages=[armature,torch.optim,lightning.pytorch,faulty]",
    ]


@pytest.fixture
def faulty(train, tmp_path):
    """Trains with what `fault` has made, and returns what was printed, and the run directory."""

    def run(*overrides: str, code: int = 0):
        result = train(*DDP, *overrides, code=code, PYTHONPATH=str(tmp_path))
        return result.stdout + result.stderr, tmp_path / "outputs" / "run"

    return run


@pytest.mark.slow
def test_ranks_that_stand_still_leave_their_stacks(faulty, tmp_path):
    words = ("launch.hang_timeout=4", "launch.max_restarts=0")
    output, run_dir = faulty(*words, *fault("sleep", step=5, folder=tmp_path), code=1)
    told = (
        r"Ranks 0, 1 made no step for [4-9] s \(their stacks are in outputs/run/logs/rank_\*\.log\)"
    )
    assert re.search(told, output), output
    stacks = [(run_dir / "logs" / f"rank_{rank:04d}.log").read_text() for rank in (0, 1)]
    assert all("most recent call first" in text for text in stacks)
    assert ["faulty/__init__.py" in text for text in stacks] == [False, True]
    waits = r"rank 0: train after step \d, at .*waits in all_?reduce of .*, number \d+ of group"
    assert re.search(waits, output, flags=re.IGNORECASE), output
    assert re.search(r"rank 1: train after step \d, at \S+faulty/__init__.py:\d+", output), output
    assert "faulty/__init__.py" in (run_dir / "logs" / "hang.txt").read_text()


@pytest.mark.slow
def test_an_error_is_retried_only_after_a_checkpoint(undisturbed, faulty, tmp_path):
    # with a save in the background, the failing rank must not wait for the others: they hang until
    # it ends
    words = [*fault("raise", step=5, folder=tmp_path, attempts=2), "checkpoint.background=true"]
    output, run_dir = faulty(*words, code=1)
    first, _, second = output.partition(
        "restart 1 of 3: rank 1 failed with ArithmeticError: the deliberate mistake; "
    )
    assert "Traceback" not in first
    assert second.startswith("the run resumes from step 4")
    assert "restart 2" not in output  # it fails at the same step again, without a newer checkpoint
    assert "Rank 1 failed first (exit code 1)" in second
    again, _ = faulty()
    assert "step=000004, step 4" in again
    assert (run_dir / "metrics.csv").read_text() == (undisturbed / "metrics.csv").read_text()


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_ranks(undisturbed, faulty, tmp_path):
    output, run_dir = faulty("launch.min_ranks=1", *fault("SIGKILL", step=1, folder=tmp_path))
    assert "resumes from the start on 1 rank instead of 2, data.micro_batch_size=4" in output
    assert "4 micro × 2 accumulation × 1 data rank" in output
    assert running.summary(run_dir)["world_size"] == 1
    assert OmegaConf.load(run_dir / "config.yaml").trainer.devices == 2
    assert running.losses(run_dir) == pytest.approx(running.losses(undisturbed), rel=1e-5)


def test_a_signal_within_a_callback_that_drops_exceptions_still_ends_the_run(capfd):
    class Referent:
        pass

    referent = Referent()
    weak = weakref.ref(referent, lambda _: signal.raise_signal(signal.SIGTERM))
    usual = signal.getsignal(signal.SIGTERM)
    with supervise.Stop(grace_seconds=1) as stop:
        del (
            referent
        )  # the handler runs in the callback, where Python would print what it raises and go on
        assert weak() is None
        assert stop.received == signal.SIGTERM
        with pytest.raises(SignalException, match="SIGTERM"):
            time.sleep(10)
    assert "Traceback" not in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is usual


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGINT twice", "the parent is killed"])
def test_all_processes_end_at_once(how, corpus, tmp_path):
    endless = [*DDP, "trainer.max_steps=100000", "scheduler=constant", "data.num_workers=1"]
    process, members = running.start(*endless, cwd=tmp_path, corpus=corpus)
    assert len(members) >= 5  # the parent, two ranks and a data loader worker each
    (stopped,) = (p for p in members if p.environ().get("RANK") == "1" and p.ppid() == process.pid)
    stopped.send_signal(signal.SIGSTOP)  # so that the other waits for it in a collective
    time.sleep(0.5)
    if how == "SIGINT twice":
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
    else:
        process.kill()
    running.wait_for(lambda: not running.alive(members), seconds=2.5, what="no orphan")
    process.communicate()
    assert process.returncode == (130 if how == "SIGINT twice" else -9)


# ------------------------------------------------------------ the rules, without processes
@pytest.fixture
def composed(composed):
    """Composes a checked configuration of 4 ranks."""
    return partial(composed, "trainer.devices=4")


@pytest.fixture
def attempts(composed, monkeypatch, tmp_path):
    """Runs the loop over attempts that are made up: for each, the checkpoint it leaves and how it
    ends.
    """
    cfg = composed("strategy=ddp", "run.name=run")
    cfg.run.dir = str(tmp_path / "run")

    def run(*outcomes):
        made = []

        def attempt(self, number, *, max_restarts):
            made.append(number)
            step, failure = outcomes[number]
            monkeypatch.setattr(
                supervise.resume, "last_checkpoint", lambda *_: tmp_path / f"step={step:06d}"
            )
            return failure() if callable(failure) else failure

        monkeypatch.setattr(supervise.resume, "last_checkpoint", lambda *_: None)
        monkeypatch.setattr(supervise._Attempts, "attempt", attempt)
        try:
            supervise.run(cfg)
        finally:
            run.made = made

    return run


KILLED = Failure("rank 1 was killed", "Rank 1 was killed.")
WRONG = Failure("rank 1 failed with an error", "Traceback\nRank 1 failed", is_error=True)


def test_a_rank_that_is_lost_comes_back_as_often_as_was_asked_for(attempts, capsys):
    attempts((2, KILLED), (4, WRONG), (6, KILLED), (8, None))
    assert attempts.made == [0, 1, 2, 3]
    with pytest.raises(
        RunFailed, match=r"Rank 1 was killed\.\nlaunch.max_restarts=3: no restart remains"
    ):
        attempts((2, KILLED), (4, KILLED), (6, KILLED), (8, KILLED))


def test_two_attempts_must_follow_each_other_to_end_a_run(attempts):
    attempts((2, KILLED), (2, KILLED), (4, KILLED), (6, None))
    with pytest.raises(RunFailed, match="no progress: 2 attempts in a row"):
        attempts((2, KILLED), (2, KILLED), (2, KILLED))


def test_an_error_without_progress_ends_the_run(attempts):
    with pytest.raises(RunFailed, match="Rank 1 failed"):
        attempts((2, KILLED), (2, WRONG))
    assert attempts.made == [0, 1]


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 138)])
def test_a_signal_between_two_attempts_ends_the_run(name, code, attempts):
    def fail_while_a_signal_comes():
        os.kill(os.getpid(), getattr(signal, name))
        return KILLED

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RunFailed, match=f"Stopped by {name}") as raised:
        attempts((2, fail_while_a_signal_comes), (4, None))
    assert raised.value.exit_code == code
    assert attempts.made == [0]
    assert signal.getsignal(signal.SIGTERM) is before


def failure(folder, *, rank: int, code: int, at: float, error: str | None = None):
    file = folder / f"{rank}.json"
    if error is not None:
        file.write_text("{}")
        os.utime(file, (at, at))
    data = {"message": {"message": error, "extraInfo": {"py_callstack": f"Traceback\n{error}"}}}
    return SimpleNamespace(
        exitcode=code, error_file=str(file), error_file_data=data, timestamp=int(at), message="…"
    )


WRONG_SUM = "ArithmeticError: wrong"


@pytest.fixture
def first_failure(tmp_path):
    cfg = OmegaConf.create({"run": {"dir": str(tmp_path), "name": "run"}})

    def describe(*failures, ended=(), deaths=None):
        watch: Any = SimpleNamespace(hung={}, ended={*ended}, deaths=deaths or {})
        return supervise.describe(dict(enumerate(failures)), watch, cfg, oom=False)

    return describe


@pytest.mark.parametrize("kind", ["NotSaved", "EndedByCode", "ConfigError"])
def test_what_no_restart_would_mend_is_one_line_and_the_end(kind, first_failure, tmp_path):
    line = "The checkpoint of step 6 could not be saved: s3://a: no answer (last: step=000004)."
    with pytest.raises(ConfigError if kind == "ConfigError" else RunFailed) as raised:
        first_failure(failure(tmp_path, rank=0, code=1, at=1.0, error=f"{kind}: {line}"))
    assert str(raised.value) == line


def test_a_rank_that_was_told_to_stop_before_it_listened_stops_the_run(first_failure, tmp_path):
    with pytest.raises(RunFailed, match="Stopped by SIGUSR1") as raised:
        first_failure(failure(tmp_path, rank=0, code=-signal.SIGUSR1, at=1.0))
    assert raised.value.exit_code == 138


def test_a_rank_that_was_ended_for_another_is_not_taken_for_the_first(first_failure, tmp_path):
    found = first_failure(
        failure(tmp_path, rank=0, code=1, at=100.0, error=WRONG_SUM),
        failure(tmp_path, rank=1, code=-9, at=105.0),
        ended={1},
        deaths={1: 105.0},
    )
    assert found.what == "rank 0 failed with ArithmeticError: wrong"
    assert "call each part" in first_failure(failure(tmp_path, rank=2, code=-6, at=105.0)).text


@pytest.mark.parametrize(
    ("overrides", "devices", "micro", "accumulate"),
    [
        (["data.global_batch_size=12", "data.micro_batch_size=3"], 2, 3, 2),
        (["data.global_batch_size=12", "data.micro_batch_size=auto"], 3, 2, 2),
        (["data.global_batch_size=24", "data.micro_batch_size=6", "trainer.devices=4"], 3, 4, 2),
        (["strategy=fsdp_tensor", "strategy.tensor=2"], 2, 4, 2),
    ],
)
def test_fewer_ranks_see_the_same_batch(overrides, devices, micro, accumulate, composed):
    cfg = composed("strategy=ddp", *overrides)
    found = resize.fewer(cfg, most=2 if micro == 3 else 3, least=1)
    assert not isinstance(found, str), found
    assert (found.trainer.devices, micro_batch.decided(found).data.micro_batch_size) == (
        devices,
        micro,
    )
    assert micro_batch.is_auto(found) == micro_batch.is_auto(cfg)
    batch = micro * accumulate * Layout.of(found).data_ranks
    assert found.data.global_batch_size == cfg.data.global_batch_size == batch
    again = cfg.copy()
    resize.apply(again, resize.difference(cfg, found))
    assert again == found
    assert json.loads(resize.difference(cfg, cfg)) == {}


BAD = {
    "launch.max_restarts=often": "max_restarts=often: must be a whole number from 0",
    "launch.max_restarts=-1": "launch.max_restarts=-1",
    "launch.min_ranks=5": r"launch.min_ranks=5: must be from 1 to trainer.devices=4",
    "launch.min_ranks=0": "launch.min_ranks=0",
    "launch.hang_timeout=0": "launch.hang_timeout=0: must be a number above 0",
    "launch.stop_minutes_before_limit=-1": r"limit=-1.0: must be a number above 0",
}


@pytest.mark.parametrize("override", BAD)
def test_a_bad_value_is_refused(override, composed):
    with pytest.raises(ConfigError, match=BAD[override]):
        composed("strategy=ddp", override)


def test_auto_brings_several_ranks_back_and_leaves_one_in_this_process(composed):
    assert composed("strategy=ddp").launch.max_restarts == 3
    assert composed("trainer.devices=1").launch.max_restarts == 0
