"""Weights that must be the same on all ranks."""

import pytest
import torch
from torch import nn

from armature.training import replicas


def weights(change: float = 0.0, dtype: torch.dtype = torch.float32) -> replicas.Sums:
    model = nn.Linear(8, 8)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 64).reshape(8, 8))
        model.weight[0, 0] += change
        model.bias.fill_(0.5)
    return replicas.sums(dict(model.to(dtype).named_parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_first_weight_that_differs_from_rank_0s_is_named(dtype):
    same, small, other = (weights(change, dtype) for change in (0.0, 1e-6, 1.0))
    assert replicas.first_difference([same, same, small]) is None
    assert replicas.first_difference([same, same, other]) == ("weight", 2)


def test_a_weight_that_one_rank_has_alone_differs():
    own = weights()
    assert replicas.first_difference([own, {**own, "added": (1.0, 1.0, 1e-4)}]) == ("added", 1)


def test_weights_that_are_not_finite_are_left_to_on_nan():
    assert replicas.first_difference([weights(), weights(float("nan"))]) is None


def test_weights_that_torch_cannot_add_up_are_left_out():
    class Quantized(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.sum:
                raise NotImplementedError
            return super().__torch_function__(func, types, args, kwargs)

    named = {
        "float8": torch.zeros(8, dtype=torch.float8_e4m3fn), "quantized": torch.zeros(8).as_subclass(Quantized),
        "scale": nn.Parameter(torch.tensor(2.0)),
    }  # fmt: skip
    assert replicas.sums(named) == {"scale": (2.0, 2.0, 1e-4)}  # pyright: ignore[reportArgumentType]
