"""The ranks agree on a stop, whichever of them was signaled or decided it."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from armature.training.stop import StopOnSignal, StoppedBySignal
from tests.support.parity.harness import on_ranks


def stopped_at(
    signaled_at: int, decided_at: int, steps: int, device: str = "cpu"
) -> tuple[int, str | None]:
    """Return the step at which this rank stops, and why; only the last rank has a reason."""
    import torch
    import torch.distributed as dist

    stop: Any = StopOnSignal()
    vote = stop._vote  # gloo carries what a GPU's queue does
    stop._vote = lambda *numbers, device: vote(*numbers)
    strategy = SimpleNamespace(root_device=torch.device(device))
    trainer: Any = SimpleNamespace(should_stop=False, strategy=strategy)
    last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
    for step in range(1, steps + 1):
        if last and step == signaled_at:
            stop._handle(signal.SIGTERM, None)
        trainer.should_stop = last and step == decided_at
        try:
            stop.step_ended(trainer)
        except StoppedBySignal:
            return step, stop.received
        if trainer.should_stop:
            return step, None
    return 0, None


def test_one_process_stops_after_the_step_that_it_is_in():
    assert stopped_at(3, 0, 5) == (3, "SIGTERM")
    assert stopped_at(0, 3, 5) == (3, None)


def test_on_a_gpu_it_stops_one_step_later_as_several_do():
    assert stopped_at(3, 0, 5, "cuda") == (4, "SIGTERM")
    assert stopped_at(0, 3, 5, "cuda") == (4, None)


@pytest.mark.slow
def test_ranks_stop_together_after_the_same_step():
    assert on_ranks(stopped_at, 3, 0, 5, ranks=2) == [(3, "SIGTERM")] * 2
    assert on_ranks(stopped_at, 0, 3, 5, ranks=2) == [(3, None)] * 2
    assert on_ranks(stopped_at, 3, 0, 5, "cuda", ranks=2) == [(4, "SIGTERM")] * 2
    assert on_ranks(stopped_at, 0, 3, 5, "cuda", ranks=2) == [(4, None)] * 2
