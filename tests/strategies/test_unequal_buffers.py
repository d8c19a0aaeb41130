"""Buffers that differ from rank to rank are named when a checkpoint is saved."""

import pytest
import torch
from torch import nn

from armature.checkpoint import buffers
from armature.strategies.single import SingleDevice


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


def test_sums_that_differ_by_the_order_of_addition_are_equal():
    assert buffers.unequal([{"a": 0.1 + 0.2 + 0.3}, {"a": 0.3 + 0.2 + 0.1}]) == []
    assert buffers.unequal([{"a": 1.0}, {"a": 1.0 + 1e-7, "b": 0.0}]) == ["a", "b"]
    assert buffers.unequal([{"a": float("inf")}, {"a": float("inf")}, {"a": float("nan")}]) == ["a"]


def test_each_run_names_a_buffer_once():
    for strategy in (SingleDevice(), SingleDevice()):
        with pytest.warns(UserWarning, match=r"hold moved of rank 0 only.*type strategy=ddp"):
            strategy._warn_of_unequal_buffers(["moved"])
        strategy._warn_of_unequal_buffers(["moved"])  # a warning would be an error
        with pytest.warns(UserWarning, match="hold other of"):
            strategy._warn_of_unequal_buffers(["moved", "other"])


def test_where_buffers_are_copied_the_loss_of_the_others_is_named():
    strategy = SingleDevice()
    strategy.copies_buffers = True
    with pytest.warns(
        UserWarning, match="different values into moved, and each step begins with those of rank 0"
    ):
        strategy._warn_of_unequal_buffers(["moved"])
