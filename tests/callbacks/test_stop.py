"""The ranks agree on a stop, whichever of them was signaled, and short steps are not slowed down by
asking.
"""

import signal
from types import SimpleNamespace
from unittest import mock

import pytest

from armature.training import stop as module
from armature.training.stop import SHORT_VOTES, STEPS_PER_VOTE, StopOnSignal, StoppedBySignal
from benchmarks.parity.harness import on_ranks


def steps_until_stopped(
    signaled_at: int, seconds: float, steps: int, evaluated: int = 0
) -> tuple[int, int]:
    """The step at which this rank stopped, and how often it voted; only the last rank gets the
    signal.

    Args:
        seconds: how long a step takes by the clock that the vote reads, which is not this busy
            machine's.
    """
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    with mock.patch.object(module, "time", clock):
        return _steps_until_stopped(signaled_at, clock, seconds, steps, evaluated)


def _steps_until_stopped(signaled_at, clock, seconds, steps, evaluated) -> tuple[int, int]:
    import torch.distributed as dist

    stop, votes = StopOnSignal(), []
    own_reason = stop._own_reason
    stop._own_reason = lambda: votes.append(1) or own_reason()  # asked once a vote
    for step in range(1, steps + 1):
        clock.now += seconds
        if step == signaled_at and (
            not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        ):
            stop._handle(signal.SIGTERM, None)
        try:
            stop.step_ended(None)
            for _ in range(evaluated * (step % 100 == 0)):
                stop.on_validation_batch_end(None)
        except StoppedBySignal:
            assert stop.received == "SIGTERM"
            return step, len(votes)
    return 0, len(votes)


def test_one_process_stops_after_the_step_that_it_is_in():
    assert steps_until_stopped(SHORT_VOTES + 7, 0.001, SHORT_VOTES + 20) == (
        SHORT_VOTES + 7,
        SHORT_VOTES + 7,
    )


@pytest.mark.slow
def test_ranks_stop_together_one_vote_after_the_signal():
    for stopped, votes in on_ranks(steps_until_stopped, 5, 0.001, 20, ranks=2):
        assert (stopped, votes) == (6, 6)


@pytest.mark.slow
def test_short_steps_share_a_vote():
    signaled = SHORT_VOTES + 5 * STEPS_PER_VOTE + 3
    for stopped, votes in on_ranks(steps_until_stopped, signaled, 0.001, 3 * SHORT_VOTES, ranks=2):
        assert (
            stopped == SHORT_VOTES + 7 * STEPS_PER_VOTE
        )  # cast at the next ten, read at the one after
        assert votes < SHORT_VOTES + 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "evaluated", [0, 30], ids=["training", "short batches of validation between"]
)
def test_long_steps_are_voted_on_one_by_one(evaluated):
    for stopped, _ in on_ranks(
        steps_until_stopped, 2 * SHORT_VOTES + 5, 0.011, 3 * SHORT_VOTES, evaluated, ranks=2
    ):
        assert stopped == 2 * SHORT_VOTES + 6
