"""Random numbers of a user's dataset: its own for each sample, and none of the model's."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from armature.data.base import DataModule
from tests.data.feeding import loader


def close(loader: Any) -> None:
    """End the loader's processes; the garbage collector would wait for them."""
    if loader.num_workers and loader.reader._iterator is not None:
        loader.reader._iterator._shutdown_workers()


class Noisy(Dataset):
    """Draws from each global generator, as many image libraries do."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        drawn = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])
        return {"inputs": drawn, "targets": torch.tensor(index)}


class NoisyData(DataModule):
    def dataset(self, split):
        return Noisy()


@pytest.mark.parametrize("split", ["train", "val"])
def test_global_generators_are_a_samples_own(split):
    def inputs(workers):
        sizes = {"global_batch_size": 4, "eval_batch_size": 4}
        made = loader(NoisyData(), split, **sizes, num_workers=workers)
        drawn = torch.cat([batch["inputs"] for batch in made])
        close(made)
        return drawn

    first = inputs(0)
    assert len(first.unique()) == first.numel()
    assert torch.equal(first, inputs(2))


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_does_not_change_the_models_generators(workers):
    def drawn():
        return random.random(), np.random.rand(), torch.rand(()).item()

    def seeded(between):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        first = drawn()
        between()
        return first, drawn()

    def load():
        made = loader(NoisyData(), global_batch_size=4, num_workers=workers)
        list(made)
        close(made)

    assert seeded(load) == seeded(lambda: None)
