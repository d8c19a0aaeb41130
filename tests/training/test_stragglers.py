"""A rank that the others wait for is named, whatever the strategy, and only if it is slow for a
while.
"""

import time

import numpy as np
import pytest

from armature.training.stragglers import Calls, Record, slowest
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
