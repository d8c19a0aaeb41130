"""Ranks that no process of ours watches find a hang themselves, report it and end."""

import math
import re
import threading
import time

import pytest
import torch.distributed as dist

from armature.training import hang_watch
from armature.training.hang_watch import HangWatch, Pulse
from tests import forked, running


@pytest.fixture
def make(monkeypatch, tmp_path):
    """Make the watches of two ranks with one store; each appends its rank and its error to
    `make.ended` as it exits.
    """
    for name, seconds in {
        "POLL": 0.05,
        "ASK": 0.05,
        "ANSWER": 1.0,
        "JUDGE": 2.0,
        "LAST": 0.0,
    }.items():
        monkeypatch.setattr(hang_watch, f"{name}_SECONDS", seconds)
    monkeypatch.setenv("WORLD_SIZE", "2")
    store, watches, said = dist.HashStore(), [], threading.local()  # pyright: ignore[reportPrivateImportUsage]

    def made(rank, *, store=store, **options):
        monkeypatch.setenv("RANK", str(rank))
        options = {
            "timeout": 0.2,
            "attempt": "a",
            "logs": tmp_path,
            "place": lambda: "train after step 7",
        } | options
        pulse = Pulse(beats=1, slowest=0.01)

        def record(error):
            said.value = rank, str(error)
            watch.stop()

        watch = HangWatch(pulse, record=record, **options)
        monkeypatch.setattr(watch, "_connect", lambda: store)
        watches.append(watch)
        return watch

    made.ended = []
    # only then: a test that ended before would give its process the real one back
    monkeypatch.setattr(hang_watch.os, "_exit", lambda code: made.ended.append(said.value))
    yield made
    for watch in watches:
        watch.stop()


def test_all_ranks_report_a_hang_and_end(make, tmp_path, capfd):
    watches = [make(0), make(1)]
    for watch in watches:
        watch.start()
    running.wait_for(
        lambda: {rank for rank, _ in make.ended} == {0, 1}, seconds=10, what="both ranks' end"
    )
    assert all(
        f"{tmp_path}/hang.txt says what each rank was doing" in text for _, text in make.ended
    )
    report = (tmp_path / "hang.txt").read_text()
    assert "rank 0: train after step 7" in report
    assert "rank 1: train after step 7" in report
    assert "Thread 0x" in (tmp_path / "rank_0001.log").read_text()
    assert capfd.readouterr().err.count("No step was made for") == 1


def test_a_rank_that_makes_steps_ends_none(make):
    watch = make(0)
    watch.start()
    for _ in range(20):
        watch.pulse.beats += 1
        time.sleep(0.03)
    assert not make.ended


def test_auto_waits_for_a_rank_that_saves(make, monkeypatch):
    monkeypatch.setattr(hang_watch, "AUTO_SECONDS", 0.2)
    waits, saves = make(0, timeout="auto"), make(1, timeout="auto")
    saves.pulse.slowest = math.inf
    for watch in (waits, saves):
        watch.start()
    running.wait_for(lambda: waits._judged > 0, seconds=10, what="an answer")
    assert not make.ended
    saves.pulse.slowest = 0.01  # it has saved, and both hang
    running.wait_for(
        lambda: {rank for rank, _ in make.ended} == {0, 1}, seconds=10, what="both ranks' end"
    )


def test_a_store_that_never_answers_ends_the_run(make):
    class Dead:
        def add(self, *args):
            time.sleep(60)
            raise RuntimeError("the connection is closed")

    make(1, store=Dead()).start()
    running.wait_for(lambda: make.ended, seconds=10, what="the end")
    assert (
        "the process or the machine of rank 0 hangs, or the network is cut. Rank 1 is at"
        in make.ended[0][1]
    )


def hang(corpus, name: str, callback: str, *overrides: str) -> str:
    """Return what a run of two ranks prints that another launcher started, and that a callback lets
    hang.
    """
    ended = forked.shared().train(
        *running.TINY,
        f"data.path={corpus}",
        "trainer.devices=2",
        f"run.name={name}",
        "launch.hang_timeout=2",
        "launch.allowed_packages=[armature,torch.optim,lightning.pytorch,tests]",
        f"+callbacks.hangs={{_target_:tests.launcher.hanging.{callback}}}",
        *overrides,
        ranks=2,
        expect=1,
        seconds=60,
    )
    assert ended.codes == [1, 1]
    return ended.output


@pytest.mark.slow
def test_ranks_that_another_launcher_started_report_a_hang(corpus):
    output = hang(corpus, "hanging", "Sleeps,step:2", "strategy=ddp")
    came = (
        r"No step was made for \d s. Rank 0 waits in all_reduce.*, collective \d+ of all ranks; "
        r"rank 1 never came "
        r"\(rank 1 is at \S+hanging.py"
    )
    assert re.search(came, output), output
    logs = forked.shared().cwd / "outputs" / "hanging" / "logs"
    assert re.search(
        r"rank 1: train after step \d; its last finished", (logs / "hang.txt").read_text()
    )
    assert "hanging.py" in (logs / "rank_0001.log").read_text()


@pytest.mark.slow
def test_a_sharded_weight_that_one_rank_uses_is_named_with_what_to_type(corpus):
    output = hang(corpus, "uses_weights", "UsesWeights", "strategy=fsdp")
    told = (
        r"Rank 0 computes with a sharded weight at \S+hanging.py:\d+ on_train_batch_start, .* "
        r"If this is inside"
    )
    assert re.search(told, output), output
