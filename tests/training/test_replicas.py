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


@pytest.fixture
def updates(monkeypatch):
    """Check an optimizer of two ranks, the second of which has other rates, steps or a stage of its
    own.
    """
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    config = SimpleNamespace(monitor="val/loss", scheduler=SimpleNamespace(optimizer=optimizer))
    trainer: Any = SimpleNamespace(
        optimizers=[optimizer], lr_scheduler_configs=[config], lightning_module=nn.Linear(1, 1)
    )
    gathered = SimpleNamespace(names=["net.0", "net.1"], order=7, counts=[4, 4])
    strategy = SimpleNamespace(
        world_size=2,
        replicates_weights=False,
        stage=0,
        steps_made={optimizer: 4},
        gathered=gathered,
    )
    monkeypatch.setattr(replicas.StrategyMixin, "find", lambda trainer: strategy)
    monkeypatch.setattr(replicas, "completed_batches", lambda trainer: 4)

    def check(
        *,
        rates: tuple[float, ...] = (0.1,),
        steps: int = 4,
        stage: int = 0,
        order: int = 7,
        counts: tuple[int, ...] = (4, 4),
    ) -> None:
        other = (stage, (order, [*counts]), [(steps, [*rates])], {})
        monkeypatch.setattr(replicas.process_group, "all_gather_object", lambda own: [own, other])
        replicas.check(trainer)

    return check


def test_learning_rates_that_follow_each_rank_s_own_value_are_named(updates):
    updates(rates=(0.1 + 1e-9,))
    with pytest.raises(
        ConfigError,
        match=r'rate of SGD is .* 0\.1 on rank 0 and 0\.01 on rank 1.*log\("val/loss", …',
    ):
        updates(rates=(0.01,))


def test_steps_that_each_rank_decides_about_are_named(updates):
    updates()
    with pytest.raises(
        ConfigError, match=r"number of steps of SGD is .* after step 4: 4 on rank 0 and 3 on rank 1"
    ):
        updates(steps=3)


def test_another_stage_of_a_pipeline_may_have_other_groups(updates):
    updates(rates=(0.01, 0.1), stage=1)
    updates(order=1, counts=(4,), stage=1)  # or units


def test_ranks_that_gather_other_weights_are_named(updates):
    with pytest.raises(
        ConfigError, match=r"net\.1 is called 4 times on rank 0 and 5 on rank 1, after step 4"
    ):
        updates(order=8, counts=(4, 5))
    with pytest.raises(ConfigError, match=r"modules are called in another order on rank 1"):
        updates(order=8)


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
        "float8": torch.zeros(8, dtype=torch.float8_e4m3fn),
        "quantized": torch.zeros(8).as_subclass(Quantized),
        "scale": nn.Parameter(torch.tensor(2.0)),
    }
    assert replicas.sums(named) == {"scale": (2.0, 2.0, 1e-4)}  # pyright: ignore[reportArgumentType]
