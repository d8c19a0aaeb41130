"""Weights that must be the same on all ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from armature.errors import ConfigError
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


@pytest.mark.parametrize("replicates", [True, False])
def test_learning_rates_that_follow_each_rank_s_own_value_are_named(replicates, monkeypatch):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    config = SimpleNamespace(reduce_on_plateau=True, monitor="val/loss", scheduler=SimpleNamespace(best=0.5))
    trainer: Any = SimpleNamespace(
        optimizers=[optimizer], lr_scheduler_configs=[config], lightning_module=nn.Linear(1, 1)
    )
    strategy = SimpleNamespace(world_size=2, replicates_weights=replicates, replicated_weights=dict)
    monkeypatch.setattr(replicas.StrategyMixin, "find", lambda trainer: strategy)
    monkeypatch.setattr(replicas, "completed_batches", lambda trainer: 4)

    def other_rank_has(rates: list[float], best: str) -> None:
        gathered = {tuple: (rates, [best])}
        monkeypatch.setattr(
            replicas.process_group, "all_gather_object", lambda own: [own, gathered.get(type(own), own)]
        )

    other_rank_has([0.1], "0.4")
    replicas.check(trainer)
    other_rank_has([0.01], "0.5")  # of a pipeline's stage, which has another group
    replicas.check(trainer)
    other_rank_has([0.01], "0.4")
    with pytest.raises(ConfigError, match=r'0\.1 on rank 0 and 0\.01 on rank 1.*self\.log\("val/loss", …'):
        replicas.check(trainer)


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
