"""A rank that the others wait for is named, whatever the strategy, and only if it is slow for a
while.
"""

import time

import numpy as np
import pytest

from armature.training import stragglers
from armature.training.stragglers import Calls, Record, Straggler, StragglerWatch, slowest
from tests import forked, running

STEPS = 10


def one_stage(rank):
    return 0


def record(steps, groups, *, host="a", node=0, met=1000.0):
    """A rank's record.

    `groups`: for each, when its collectives began in each step, and whether they overlap.
    """
    calls = {}
    for name, (begun, overlaps) in groups.items():
        begun = np.array(begun, dtype=float)
        numbers, each = np.arange(begun.size), begun.shape[1]
        calls[name] = Calls(
            numbers, numbers // each, begun.ravel(), np.full(begun.size, np.nan), overlaps
        )
    return Record(host, node, met, steps * STEPS, float(STEPS), calls)


def lockstep(own, *, parts=1, overlaps=False, offset=0.0, rank=0, delays=()):
    """When a rank begins the collectives of each step: `parts` per step, each when the rank has
    done its own work.

    Args:
        own: seconds of a step of the slowest rank.
        delays: seconds by which this rank is early at each of a step's collectives.
    """
    return [
        [
            offset + step * own + (part + 1) * own / parts - (delays[part] if delays else 0.0)
            for part in range(parts)
        ]
        for step in range(STEPS)
    ]


def test_ddp_names_the_rank_whose_buckets_come_last():
    late = [
        0.2,
        0.2,
        0.2,
    ]  # overlapping buckets: the others are early at each of them, but wait once per step
    early = {"0~": (lockstep(0.4, parts=3, delays=late), True)}
    records = [
        record(0.4, early),
        record(0.4, {"0~": (lockstep(0.4, parts=3), True)}, host="b"),
        record(0.4, early),
    ]
    found = slowest(records, stage=one_stage)
    assert found is not None
    assert (found.rank, found.host) == (1, "b")
    assert found.ratio == pytest.approx(2.0)
    assert (found.step_seconds, found.others_seconds) == (pytest.approx(0.4), pytest.approx(0.2))


def test_fsdp_names_the_rank_that_is_late_at_every_block():
    early = {"1": (lockstep(0.4, parts=8, delays=[0.025] * 8), False)}
    records = [record(0.4, early), record(0.4, {"1": (lockstep(0.4, parts=8), False)})]
    found = slowest(records, stage=one_stage)
    assert found is not None
    assert found.rank == 1
    assert found.ratio == pytest.approx(2.0)


def test_clocks_of_machines_are_brought_together():
    records = [
        record(0.4, {"0~": (lockstep(0.4, delays=[0.2]), True)}),
        record(0.4, {"0~": (lockstep(0.4, offset=-60.0), True)}, host="b", node=1, met=940.0),
    ]
    found = slowest(records, stage=one_stage)
    assert found is not None
    assert (found.rank, found.ratio) == (1, pytest.approx(2.0))


def test_a_rank_that_waits_for_the_slow_one_and_is_waited_for_is_not_named():
    """Rank 3 is slow.

    Rank 1 meets it on the shard axis and is then late at rank 0, on the tensor axis.
    """
    slow, early = lockstep(0.4), lockstep(0.4, delays=[0.2])
    records = [
        record(0.4, {"tensor01": (early, False)}),
        record(0.4, {"tensor01": (slow, False), "shard13": (early, False)}),
        record(0.4, {"tensor23": (early, False)}),
        record(0.4, {"tensor23": (slow, False), "shard13": (slow, False)}),
    ]
    found = slowest(records, stage=one_stage)
    assert found is not None
    assert found.rank == 3


def test_stages_of_a_pipeline_are_not_compared():
    """Ranks 0 and 1 are a cheap stage, 2 and 3 a dear one, in which 3 is slow."""
    early, late = lockstep(0.4, delays=[0.2]), lockstep(0.4)
    everyone = [
        {"0~": (early, True)},
        {"0~": (early, True)},
        {"0~": (late, True)},
        {"0~": (late, True)},
    ]
    assert (
        slowest([record(0.4, groups) for groups in everyone], stage=lambda rank: rank // 2) is None
    )
    for rank, begun in ((2, early), (3, late)):
        everyone[rank]["1"] = (begun, False)
    found = slowest([record(0.4, groups) for groups in everyone], stage=lambda rank: rank // 2)
    assert found is not None
    assert found.rank == 3


def test_nccls_own_times_count_where_there_are_some():
    begun = np.arange(30.0)  # the host is ahead of the device
    records = [
        Record(
            "a",
            0,
            0.0,
            4.0,
            10.0,
            {"7": Calls(begun, begun // 3, begun, np.full(30, seconds), overlaps=False)},
        )
        for seconds in (0.07, 0.07, 0.003)
    ]
    found = slowest(records, stage=one_stage)
    assert found is not None
    assert (found.rank, found.ratio) == (2, pytest.approx(4.0 / (4.0 - 30 * 0.067)))


def test_nccls_calls_are_not_mixed_with_gloos_of_the_same_group(monkeypatch):
    def call(name: str, number: int, took: float | None) -> dict:
        return {
            "profiling_name": name,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": number,
            "time_created_ns": int((100 + number / 10) * 1e9),
            "duration_ms": took,
        }

    gloo = [call("gloo:all_reduce", number, None) for number in range(31, 40)]
    nccl = [
        call("nccl:all_reduce", number, 5.0 if number < 23 else None) for number in range(15, 25)
    ]
    monkeypatch.setattr(stragglers.blocked, "recorded", lambda: gloo + nccl)
    own = stragglers.own_record([101.0, 102.0, 103.0, 104.0, 105.0], met=105.0, ranks=2)
    assert own.groups["0~"].numbers.tolist() == list(range(15, 23))
    assert stragglers.seconds_waited([own, own], stage=one_stage) == [0.0, 0.0]


def test_ranks_that_take_turns_in_coming_last_and_short_steps_name_nobody():
    begun = [lockstep(0.4), lockstep(0.4)]
    for step in range(STEPS):
        begun[step % 2][step][0] -= 0.2
    assert slowest([record(0.4, {"0~": (each, True)}) for each in begun], stage=one_stage) is None
    tiny = [lockstep(0.004, delays=[0.003]), lockstep(0.004)]
    assert slowest([record(0.004, {"0~": (each, True)}) for each in tiny], stage=one_stage) is None
    assert slowest([record(0.4, {}), record(0.4, {})], stage=one_stage) is None


def test_a_rank_is_named_after_three_comparisons_and_not_again_for_minutes(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(stragglers.time, "monotonic", lambda: now)
    watch = StragglerWatch()
    slow = Straggler(3, "node7", 0.412, 0.196)

    def judged(found):
        return watch._judge(found, step=7, on_gpu=False)

    assert [judged(each) for each in (slow, slow, None, slow, slow)] == [None] * 5
    said = judged(slow)
    assert said is not None
    assert said.startswith(
        "Rank 3 on node7 takes 2.1 × the others' time of a step (412 against 196 ms)"
    )
    assert judged(slow) is None
    now += stragglers.QUIET_SECONDS
    assert judged(slow) is not None
    (first, _) = watch.events
    assert (first["step"], first["rank"], first["host"], first["ratio"]) == (7, 3, "node7", 2.102)


def test_a_step_of_a_rank_is_told_from_its_collectives(monkeypatch):
    def call(number, begun, name="gloo:all_reduce", **more):
        return {
            "profiling_name": name,
            "is_p2p": False,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": number,
            "time_created_ns": int(begun * 1e9),
            **more,
        }

    entries = [
        call(1, 99.5),
        call(2, 100.5),
        call(3, 101.5),
        call(4, 101.6, name="gloo:broadcast"),
        call(5, 102.5),
    ]
    monkeypatch.setattr(stragglers.blocked, "recorded", lambda: entries)
    own = stragglers.own_record([100.0, 101.0, 102.0, 103.0], met=103.1, ranks=2)
    (calls,) = own.groups.values()
    assert calls.numbers.tolist() == [2, 3, 5]
    assert calls.steps.tolist() == [1, 2, 3]
    assert calls.overlaps
    assert (own.seconds, own.steps) == (3.0, 3.0)
    monkeypatch.setattr(stragglers.blocked, "recorded", lambda: [call(1, 102.5, duration_ms=20.0)])
    own = stragglers.own_record([100.0, 101.0, 102.0, 103.0], met=103.1, ranks=2)
    assert own.groups["0~"].seconds.tolist() == [0.02]
    assert (own.seconds, own.steps) == (0.5, 0.5)  # older calls are recorded no more


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "part", "seconds"),
    [("ddp", "model", 0.15), ("fsdp", "model.blocks.1", 0.15), ("ddp", "model", 0.0)],
)
def test_a_rank_at_less_than_half_speed_is_named_while_it_trains(strategy, part, seconds, corpus):
    forks, name = forked.shared(), f"{strategy}-{seconds}"
    started = time.monotonic()
    slow = f"{{_target_:tests.training.disturbing.Slow,seconds:{seconds},part:{part}}}"
    ended = forks.train(
        *running.TINY,
        f"data.path={corpus}",
        f"strategy={strategy}",
        "trainer.devices=2",
        f"run.name={name}",
        "trainer.max_steps=30",
        "trainer.log_every_n_steps=5",
        "launch.allowed_packages=[armature,torch.optim,lightning.pytorch,tests]",
        f"+callbacks.slow={slow}",
        ranks=2,
        expect=0,
        seconds=100,
    )
    assert time.monotonic() - started < 100
    events = running.summary(forks.cwd / "outputs" / name)["stragglers"]
    if not seconds:
        assert events == []
        assert "Rank 1" not in ended.output
        return
    (event,) = events
    assert event["rank"] == 1
    assert event["seconds_per_step"] - event["seconds_per_step_of_others"] == pytest.approx(
        seconds, rel=0.5
    )
    assert "Rank 1 on " in ended.output
    assert "the others' time of a step" in ended.output
