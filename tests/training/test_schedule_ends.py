"""A resumed schedule of torch's keeps its length, which is said; one that would end before the run
is refused.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from armature.training import schedule_ends


def cosine(optimizer, length):
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=length)


def warmed(optimizer, length):
    parts = [lr_scheduler.LinearLR(optimizer, total_iters=2), cosine(optimizer, length)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


def one_cycle(optimizer, length):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=length)


def steps(optimizer, length):
    return lr_scheduler.MultiStepLR(optimizer, milestones=[2, length])


def resumed(make: Any, before: int, now: int, planned: int = 8) -> None:
    first, second = (
        make(torch.optim.SGD([torch.zeros(1)], lr=0.1), length) for length in (before, now)
    )
    config = SimpleNamespace(scheduler=second, interval="step", frequency=1)
    trainer: Any = SimpleNamespace(
        lr_scheduler_configs=[config], estimated_stepping_batches=planned
    )
    built = schedule_ends.lengths_of(trainer)
    second.load_state_dict(first.state_dict())
    schedule_ends.check(trainer, built)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            cosine,
            "CosineAnnealingLR was built with T_max=8, and the checkpoint has 4, which it keeps",
        ),
        (
            steps,
            "MultiStepLR was built with milestones=[2, 8], and the checkpoint has [2, 4], which it "
            "keeps",
        ),
        (warmed, "SequentialLR was built with 1.T_max=8, and the checkpoint has 4, which it keeps"),
    ],
)
def test_a_length_that_the_checkpoint_replaces_is_named(caplog, make, said):
    resumed(make, 4, 8)
    assert said in caplog.text
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "make", [cosine, warmed, one_cycle, lambda o, length: lr_scheduler.ConstantLR(o)]
)
def test_equal_lengths_and_schedules_without_one_say_nothing(caplog, make):
    resumed(make, 4, 4)
    assert not caplog.records
