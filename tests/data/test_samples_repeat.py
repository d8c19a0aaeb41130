"""Samples that are other ones when they are read again are named, since no resume can repeat
them.
"""

import logging

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from armature.data.samples import Samples

WARNING = "sample 0 of Drawing is another one when it is read again"


class Drawing(Dataset):
    """Adds noise from one of the generators that users have."""

    def __init__(self, source: str) -> None:
        self.source, self.rng, self.reads = source, np.random.default_rng(0), []

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.reads.append(index)
        if self.source == "own":
            noise = self.rng.normal()
        elif self.source == "made":
            noise = np.random.default_rng(np.random.randint(2**31)).normal()
        else:
            noise = {
                "numpy": np.random.randn,
                "torch": lambda: torch.randn(1).item(),
                "none": lambda: np.nan,
            }[self.source]()
        return torch.tensor([float(index), noise]), {"name": "x", "number": index}


def samples(source, *, training=True):
    return Samples(Drawing(source), size=4, seed=0, training=training)


@pytest.mark.parametrize("source", ["numpy", "torch", "made", "none"])
def test_samples_that_repeat_are_not_named(source, caplog):
    data = samples(source)
    first = data.__getitems__([0, 1])
    assert WARNING not in caplog.text
    again = samples(source).__getitems__([0, 1])
    torch.testing.assert_close(first[0], again[0], equal_nan=True, rtol=0, atol=0)
    data.__getitems__([2])
    assert data.reads == [0, 0, 1, 2]


def test_a_generator_of_the_dataset_is_named_once_and_on_rank_0_alone(caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    data = samples("own")
    data.__getitems__([0, 1])
    data.__getitems__([0, 1])
    assert caplog.text.count(WARNING) == 1
    caplog.clear()
    samples("own", training=False).__getitems__([0])
    monkeypatch.setenv("RANK", "1")
    samples("own").__getitems__([0])
    assert WARNING not in caplog.text


def test_a_loader_s_first_process_names_it(capfd):
    logger = logging.getLogger("armature")
    handler = logging.StreamHandler()
    logger.addHandler(handler)
    try:
        list(
            DataLoader(samples("own"), batch_size=2, num_workers=2, collate_fn=lambda batch: batch)
        )
    finally:
        logger.removeHandler(handler)
    assert capfd.readouterr().err.count("is another one when it is read again") == 1


class Changing(Drawing):
    """Changes what it keeps."""

    def __init__(self):
        super().__init__("none")
        self.data = torch.full((4, 2), 100.0)

    def __getitem__(self, index):
        return self.data[index].div_(10)


def test_a_dataset_that_changes_what_it_keeps_is_named_and_its_sample_is_right(caplog):
    data = Samples(Changing(), size=4, seed=0, training=True)
    assert data.__getitems__([0, 1]).tolist() == [[10.0, 10.0], [10.0, 10.0]]
    assert "change a copy" in caplog.text


def test_new_loader_processes_do_not_read_it_again():
    data = samples("numpy")
    for _ in range(2):
        list(DataLoader(data, batch_size=2, num_workers=1, collate_fn=lambda batch: batch))
    assert data._repetition_known


class Collate:
    """Adds noise from one of the generators that users have."""

    def __init__(self, source):
        self.source, self.rng, self.calls = source, np.random.default_rng(0), 0

    def __call__(self, samples):
        self.calls += 1
        samples.reverse()  # in place
        noise = self.rng.normal() if self.source == "own" else torch.randn(1).item()
        return torch.stack([x for x, _ in samples]) + noise


@pytest.mark.parametrize("source", ["own", "torch"])
def test_a_collate_function_that_draws_from_a_generator_of_its_own_is_named_once(source, caplog):
    collate = Collate(source)
    data = Samples(Drawing("numpy"), size=4, seed=0, training=True, collate_fn=collate)
    first, _ = data.__getitems__([0, 1]), data.__getitems__([2, 3])
    assert collate.calls == 3
    assert caplog.text.count("collate_fn (Collate) makes another batch") == (source == "own")
    again = Samples(
        Drawing("numpy"), size=4, seed=0, training=True, collate_fn=Collate(source)
    ).__getitems__([0, 1])
    assert torch.equal(first, again)
