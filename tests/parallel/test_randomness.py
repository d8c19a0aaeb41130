"""The random state of a rank that is held until the first batch."""

import random

import pytest
import torch

from armature.parallel import randomness


@pytest.fixture(autouse=True)
def same_afterwards():
    before = randomness.capture()
    yield
    randomness.restore(before)


def test_a_save_before_the_first_batch_holds_the_rank_s_own_stream():
    """Such as that of Lightning's Tuner: all ranks would resume with the stream of the set-up."""
    state = randomness.RankRandomState()
    state.begin(seed=1, stream=3)
    randomness.begin(seed=1, stream=randomness.OF_ALL_RANKS)
    torch.rand(2)
    saved = {"layout": "ddp", "ranks": [state.current()]}
    state.restore()
    expected = torch.rand(2), random.random()
    resumed = randomness.RankRandomState()
    resumed.load(saved, layout="ddp", seed=1, stream=3, step=0)
    resumed.restore()
    assert torch.equal(torch.rand(2), expected[0])
    assert random.random() == expected[1]


def test_a_cpu_s_state_gives_each_rank_s_gpu_a_stream_of_its_own(monkeypatch):
    saved = [state_of(rank) for rank in range(2)]
    seeds = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed", seeds.append)
    for state in saved:
        randomness.begin(seed=1, stream=randomness.OF_ALL_RANKS)  # as the set-up leaves it
        randomness.restore(state)
    assert len({*seeds}) == 2


def state_of(rank: int):
    randomness.begin(seed=1, stream=rank)
    torch.rand(3)
    return randomness.capture()
