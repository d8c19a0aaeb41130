"""The report about a hang names who waits where and who never came.

`auto` finds a hang by the slowest step.
"""

import math
import os

from armature.launcher import hang
from armature.launcher.watch import AUTO_SECONDS, Rank, RankWatcher
from armature.training import blocked, heartbeat


def call(
    number, *, name="all_reduce", done=True, group="0", description="default_pg", sizes=((4096,),)
):
    return {
        "group": group,
        "description": description,
        "number": number,
        "name": name,
        "sizes": sizes,
        "done": done,
        "pairwise": False,
    }


def record(*collectives, stack=("task.py:12 training_step", "loops.py:9 advance")):
    return {"place": "train after step 7", "stack": list(stack), "collectives": list(collectives)}


def test_a_rank_that_never_came_is_named_with_where_it_is():
    records = {
        0: record(call(1), call(2, done=False)),
        1: record(call(1)),
        2: record(call(1), call(2, done=False)),
    }
    told = (
        "ranks 0, 2 wait in all_reduce of 4096, collective 2 of all ranks; rank 1 never came "
        "(rank 1 is at task.py:12"
    )
    assert hang.verdict(records, ranks=range(3)).startswith(told)
    text = hang.report(records, ranks=range(3), seconds=300)
    assert (
        "rank 1: train after step 7; its last finished one is all_reduce of 4096, 1 of all ranks"
        in text
    )
    assert "    task.py:12 training_step" in text


def test_a_rank_that_does_not_answer_is_named():
    records = {0: record(call(5, done=False))}
    assert "rank 1 never came." in hang.verdict(records, ranks=range(2))
    assert "rank 1 did not answer" in hang.report(records, ranks=range(2), seconds=9)


def test_ranks_outside_of_a_group_are_not_waited_for():
    own = {"group": "7", "description": "mesh_tensor"}
    records = {0: record(call(3, done=False, **own)), 1: record(call(2, **own)), 2: record(call(1))}
    told = (
        "rank 0 waits in all_reduce of 4096, collective 3 of group mesh_tensor (7); rank 1 "
        "never came"
    )
    assert hang.verdict(records, ranks=range(3)).startswith(told)


def test_ranks_that_all_came_are_no_cause():
    records = {rank: record(call(3, done=False)) for rank in range(2)}
    assert hang.verdict(records, ranks=range(2)).endswith(
        "all ranks came, so the network or a device hangs."
    )
    assert hang.verdict({0: record(call(3))}, ranks=range(2)) == ""


def test_ranks_that_wait_in_unrecorded_calls_are_named_by_their_stacks():
    inside = "/site-packages/torch/distributed/pipelining/schedules.py:683 _wait_batch_p2p"
    records = {
        0: record(stack=[inside, "pipeline.py:224 train"]),
        1: record(stack=["block.py:9 forward"]),
    }
    told = "rank 0 waits for another rank in schedules.py:683 _wait_batch_p2p; rank 1 does not"
    assert hang.verdict(records, ranks=range(2)) == f"{told} (rank 1 is at block.py:9 forward)."


def test_ranks_answer_a_request(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(blocked, "POLL_SECONDS", 0.02)
    blocked.answer_requests(tmp_path, place=lambda: "train after step 2")
    records = hang.ask(tmp_path, [3])
    assert records[3]["place"] == "train after step 2"
    assert any("test_ranks_answer_a_request" in frame for frame in records[3]["stack"])
    assert list(tmp_path.iterdir()) == []


def test_auto_is_twenty_of_the_slowest_steps_and_never_during_validation_and_saves(tmp_path):
    watcher = RankWatcher(tmp_path, ranks=2, hang_timeout="auto")
    watcher._ranks = {pid: Rank(pid, pid, None) for pid in (0, 1)}
    (tmp_path / "0").write_text("1.5")
    (tmp_path / "1").write_text("40.0")
    watcher._check_heartbeats(0.1)
    assert watcher._timeout() == 800.0
    (tmp_path / "1").write_text("2.0")
    os.utime(tmp_path / "1", (0, 0))
    watcher._check_heartbeats(0.1)
    assert watcher._timeout() == AUTO_SECONDS
    (tmp_path / "0").write_text("inf")
    os.utime(tmp_path / "0", (0, 0))
    watcher._check_heartbeats(1e9)
    assert not watcher.hung
    assert RankWatcher(tmp_path, ranks=2, hang_timeout=7.0)._timeout() == 7.0


class Trainer:
    accumulate_grad_batches = 2
    state = type("State", (), {"stage": None})()
    global_step = 0
    is_last_batch = False


def test_a_heart_tells_the_slowest_step_and_rests(monkeypatch, tmp_path):
    monkeypatch.setenv("ARMATURE_HEARTBEATS", str(tmp_path))
    monkeypatch.setattr(heartbeat.blocked, "answer_requests", lambda folder, place: None)
    now = 100.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
    beats, file = heartbeat.Heartbeat(), tmp_path / str(os.getpid())
    trainer = Trainer()

    def batch(index, seconds):
        nonlocal now
        beats.on_train_batch_start()
        now += seconds
        beats.on_train_batch_end(trainer, None, None, None, index)

    for index, seconds in enumerate(
        [50.0, 50.0, 2.0, 3.0, 1.0, 1.0]
    ):  # two batches are a step; the first compiles
        batch(index, seconds)
    assert float(file.read_text()) == 5.0
    beats.on_validation_start()
    assert float(file.read_text()) == math.inf
    now += 500
    beats.on_validation_batch_end()
    assert float(file.read_text()) == math.inf
    beats.on_train_batch_start()
    assert float(file.read_text()) == 5.0
    batch(6, 1.0)
    batch(7, 1.0)
    assert float(file.read_text()) == 5.0
    trainer.is_last_batch = True  # what a user's on_train_epoch_end does then is no step
    batch(8, 1.0)
    assert float(file.read_text()) == math.inf
