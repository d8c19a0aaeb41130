from itertools import chain
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armature.data.batching import plan_batches
from armature.data.sampler import PADDING, EvalSampler, TrainSampler, permuted

sizes = st.integers(1, 200)
seeds = st.integers(0, 2**63)
layouts = st.tuples(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)
)  # data ranks, micro-batch, accumulation


def read(size: int, layout: tuple[int, int, int], *, seed: int, position: int) -> list[list[int]]:
    """Return the steps of the epoch that holds `position`, each as sorted keys of all ranks and
    micro-batches.
    """
    ranks, micro, accumulate = layout
    batches = plan_batches(prod(layout), micro, ranks)
    samplers = [
        TrainSampler(
            size,
            seed=seed,
            batches=batches,
            rank=r,
            position=lambda: position,
            epoch=lambda: position // size,
            population=size,
        )
        for r in range(ranks)
    ]
    streams = [list(sampler) for sampler in samplers]
    assert len({len(stream) for stream in streams}) == 1
    assert all(len(batch) == micro for stream in streams for batch in stream)
    batch_by_batch = [[*chain(*together)] for together in zip(*streams, strict=True)]
    steps = [
        [*chain(*batch_by_batch[i : i + accumulate])]
        for i in range(0, len(batch_by_batch), accumulate)
    ]
    return [sorted(step) for step in steps]


def stream(size: int, layout: tuple[int, int, int], *, seed: int, steps: int) -> list[list[int]]:
    position, found = 0, []
    while len(found) < steps:
        epoch = read(size, layout, seed=seed, position=position)
        found += epoch
        position += len(epoch) * prod(layout)
    return found[:steps]


def test_permutation_never_changes():
    """Positions in old checkpoints refer to these samples."""
    assert permuted(np.arange(10), size=10, seed=7, epoch=2).tolist() == [
        2,
        6,
        4,
        7,
        5,
        3,
        1,
        0,
        8,
        9,
    ]


@pytest.mark.guarantee
@settings(max_examples=50)
@given(sizes, layouts, seeds)
def test_every_sample_is_seen_once_an_epoch(size, layout, seed):
    steps = -(-3 * size // prod(layout))
    keys = [*chain(*stream(size, layout, seed=seed, steps=steps))]
    for epoch in range(2):  # keys carry the epoch, and steps may straddle epochs
        assert sorted(key - epoch * size for key in keys if key // size == epoch) == list(
            range(size)
        )


@pytest.mark.guarantee
@settings(max_examples=25)
@given(sizes, st.integers(1, 24), seeds)
def test_steps_hold_the_same_samples_under_any_layout(size, global_batch, seed):
    alone = stream(size, (1, global_batch, 1), seed=seed, steps=12)
    for ranks in range(1, 7):
        for micro in range(1, global_batch // ranks + 1):
            if global_batch % (ranks * micro) == 0:
                layout = (ranks, micro, global_batch // ranks // micro)
                assert stream(size, layout, seed=seed, steps=12) == alone


@pytest.mark.guarantee
@settings(max_examples=50)
@given(sizes, layouts, layouts, seeds, st.integers(0, 30))
def test_resume_from_any_step_continues_the_stream(size, before, after, seed, step):
    """The stream continues at the position, also with other ranks and another global batch."""
    position = step * prod(before)
    resumed = read(size, after, seed=seed, position=position)
    epoch = position // size
    global_batch = prod(after)
    epochs = range(epoch, epoch + 2 + global_batch // size)
    whole = [key for e in epochs for key in _epoch(size, seed, e)][position - epoch * size :]
    for i, keys in enumerate(resumed):
        assert keys == sorted(whole[i * global_batch : (i + 1) * global_batch])
    assert len(resumed) == -(-((epoch + 1) * size - position) // global_batch)


def _epoch(size: int, seed: int, epoch: int) -> list[int]:
    return (epoch * size + permuted(np.arange(size), size=size, seed=seed, epoch=epoch)).tolist()


@pytest.mark.guarantee
@given(st.integers(0, 100), st.integers(1, 9), st.integers(1, 6))
def test_evaluation_serves_each_sample_once_in_equally_many_batches(size, batch_size, ranks):
    streams = [
        list(EvalSampler(size, batch_size=batch_size, rank=r, ranks=ranks)) for r in range(ranks)
    ]
    batches = [batch for stream in streams for batch in stream]
    assert sorted(i for batch in batches for i in batch if i != PADDING) == list(range(size))
    assert {len(stream) for stream in streams} == {-(-size // (batch_size * ranks))}
    assert all(1 <= len(batch) <= batch_size for batch in batches)
    padding = [batch for batch in batches if PADDING in batch]
    assert all(batch == [PADDING] for batch in padding)
    if size >= ranks and batch_size > 1:
        assert not padding
    sampler = EvalSampler(size, batch_size=batch_size, rank=0, ranks=ranks)
    assert sampler.has_padding == bool(padding)
    for round_ in zip(*streams, strict=True):  # in the order of the samples
        taken = [i for batch in round_ for i in batch if i != PADDING]
        assert taken == sorted(taken)
    for rank, stream in enumerate(streams):  # for predictions
        alone = EvalSampler(size, batch_size=batch_size, rank=rank, ranks=ranks, pads=False)
        assert list(alone) == [batch for batch in stream if batch != [PADDING]]
        assert len(alone) == len(list(alone))


def test_a_limited_epoch_is_the_beginning_of_each_epochs_order():
    """`trainer.limit_train_batches` shortens epochs; over many of them, all samples come."""
    batches = plan_batches(4, "auto", 1)
    seen = []
    for epoch in range(12):
        sampler = TrainSampler(
            8,
            seed=0,
            batches=batches,
            rank=0,
            position=lambda e=epoch: 8 * e,
            epoch=lambda e=epoch: e,
            population=20,
        )
        keys = [key for batch in sampler for key in batch]
        assert len(keys) == len(set(keys)) == 8
        assert all(key // 20 == epoch for key in keys)
        seen += [key % 20 for key in keys]
    assert set(seen) == set(range(20))
