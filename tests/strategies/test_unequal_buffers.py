"""Buffers that differ from rank to rank are named when a checkpoint is saved."""

import pytest
import torch
from torch import nn

from armature.checkpoint import buffers
from armature.strategies import checkpoints


def test_buffers_that_differ_are_found_and_named():
    module = nn.Module()
    module.register_buffer("same", torch.tensor([True, False]))
    module.register_buffer("nan", torch.tensor([float("nan")]))
    module.register_buffer("moved", torch.zeros(2))
    module.register_buffer("wave", torch.ones(1, dtype=torch.complex64))
    module.register_buffer("unsaved", torch.zeros(1), persistent=False)
    first = buffers.sums(module)
    assert first.keys() == {"same", "nan", "moved", "wave"}
    assert buffers.unequal([first, buffers.sums(module)]) == []
    module.moved += 1  # pyright: ignore[reportOperatorIssue]
    assert buffers.unequal([first, buffers.sums(module)]) == ["moved"]
    with pytest.warns(UserWarning, match=r"hold moved of rank 0 only.*type strategy=ddp"):
        checkpoints._warn_of_unequal_buffers("moved")
