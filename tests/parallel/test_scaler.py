"""fp16 with a loss scaler: an overflow on one rank skips the step on all; every layout trains as
one process does.
"""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

from armature.parallel import scaler
from armature.training.trainer import Trainer
from tests.support.parity.harness import (
    LAYOUTS,
    Job,
    Run,
    difference,
    fit,
    gathered_types,
    on_ranks,
)
from tests.trainers import quiet_trainer

TOLERANCE = 2e-3  # of fp16's products, which sum in another order
OVERFLOWING = "tests.parallel.users.overflow.model.Overflowing"


def job(layout: str, **changes: Any) -> Job:
    changes = {"precision": "16-mixed", "model": OVERFLOWING, "steps": 6} | changes
    return replace(LAYOUTS[layout], **changes)


@cache
def alone() -> Run:
    return fit(job("single"))


def assert_same(run: Run, steps: int = 6) -> None:
    reference = alone()
    skipped = [not math.isfinite(norm) for norm in run.grad_norms]
    assert skipped == [not math.isfinite(norm) for norm in reference.grad_norms[-steps:]]
    assert sum(skipped) == steps // 2
    assert run.facts["scaler"] == reference.facts["scaler"]
    assert run.facts["global_step"] == reference.facts["global_step"] == 6
    made = [norm for norm in run.grad_norms if math.isfinite(norm)]
    expected = [norm for norm in reference.grad_norms[-steps:] if math.isfinite(norm)]
    far = difference(replace(run, grad_norms=made), replace(reference, grad_norms=expected))
    assert max(far.values()) <= TOLERANCE, far


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "fsdp 2",
        "hsdp 2×2",
        "tensor 2, sequence parallel",
        "pipeline 2, 1f1b",
        "pipeline 2, zero bubble",
        "2×2×2",
    ],
)
def test_fp16_trains_as_one_process_does_and_skips_the_same_steps(layout):
    assert alone().facts["scaler"]["scale"] == 2.0**16 / 2**3  # every second of six steps overflows
    assert_same(fit(job(layout)))


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")  # there is no GPU here
def test_a_mesh_takes_fp16_on_a_gpu():
    (plugin,) = scaler.precision_arguments("16-mixed", mesh=True)["plugins"]
    assert plugin.precision == "16-mixed"
    assert plugin.scaler is not None
    assert scaler.precision_arguments("16-mixed", mesh=False) == {"precision": "16-mixed"}
    assert scaler.precision_arguments("bf16-mixed", mesh=True) == {"precision": "bf16-mixed"}


@pytest.mark.slow
def test_fsdp_gathers_weights_in_fp16():
    assert gathered_types(torch.nn.Linear, job("fsdp 2", steps=1)) == [{torch.float16}] * 2


@pytest.mark.slow
def test_a_fused_optimizer_skips_them_too():
    fused = {"lr": 3e-3, "eps": 1e-6, "fused": True}
    assert_same(fit(job("fsdp 2", optimizer_args=fused)))


@pytest.mark.slow
def test_the_scale_is_saved_and_resumed_under_another_layout(tmp_path):
    folder = str(tmp_path / "step=4")
    saved = fit(job("pipeline 2, 1f1b", steps=4, save=folder))
    assert saved.facts["scaler"]["scale"] == 2.0**14
    assert_same(fit(job("fsdp 2", resume=folder)), steps=2)


def step_with_an_infinity_on_rank_1(fused: bool) -> tuple[bool, list[float], float]:
    import torch.distributed as dist

    from armature.parallel.scaler import SharedScaler

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], fused=fused)
    scaler = SharedScaler(device="cpu")
    scaler.scale(weight.sum()).backward()
    assert weight.grad is not None
    if dist.get_rank() == 1:
        weight.grad[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    return scaler.skipped, weight.tolist(), scaler.get_scale()


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_all_ranks_skip_the_step_if_one_rank_finds_an_infinity(fused):
    assert (
        on_ranks(step_with_an_infinity_on_rank_1, fused, ranks=2)
        == [(True, [1.0, 1.0], 2.0**15)] * 2
    )


def test_the_scale_changes_as_torchs():
    found = []
    for kind in (scaler.SharedScaler, torch.amp.GradScaler):
        ours = kind(device="cpu")
        ours.set_growth_interval(2)
        ours.load_state_dict(ours.state_dict() | {"scale": 2.0**126})
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer, scales = torch.optim.SGD([weight]), []
        for gradient in (0.0, 0.0, 0.0, 0.0, 0.0, math.inf, 0.0, math.inf, 0.0, 0.0):
            weight.grad = ours.scale(torch.ones(1)) * gradient
            ours.step(optimizer)
            ours.update()
            scales.append((ours.get_scale(), ours.state_dict()["_growth_tracker"]))
        found.append(scales)
    assert found[0] == found[1]
    assert max(found[0]) == (2.0**127, 1)  # twice that is no number in fp32


class Halving(L.LightningModule):
    """Its second batch overflows, and its schedule halves the rate in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.rates: list[float] = []
        self.skipped: list[bool] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch[0]).float().mean() / 100
        return loss * math.inf if batch_idx == 1 else loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.skipped.append(self.trainer.strategy.skipped_step)  # pyright: ignore[reportAttributeAccessIssue]


class Skipping(Halving):
    """Some of its batches give no loss."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
        return None if batch_idx in (0, 2) else super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0, fused=True)


def fit_four_batches(module: L.LightningModule) -> Trainer:
    trainer = quiet_trainer(plugins=[MixedPrecision("16-mixed", device="cpu")], max_steps=4)
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2))
    return trainer


@pytest.mark.filterwarnings("ignore")
def test_a_batch_without_a_loss_is_left_out_with_a_fused_optimizer_too():
    module = Skipping()
    assert fit_four_batches(module).completed_batches == 4
    assert module.skipped == [False, True, False, False], "by an overflow"


@pytest.mark.filterwarnings("ignore")
def test_a_skipped_step_moves_no_schedule_and_counts_as_a_batch():
    module = Halving()
    assert fit_four_batches(module).completed_batches == 4
    assert module.skipped == [False, True, False, False]
    assert module.rates == [1.0, 0.5, 0.5, 0.25]


class Clipping(L.LightningModule):
    """Two optimizers, whose gradients are clipped by hand before either makes its step, and dropped
    in batch 1.
    """

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.fused = False, fused
        self.first, self.second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        self.norms: list[float] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward((3 * self.first + 4 * self.second).mean())
        for optimizer, limit in zip(optimizers, (1.0, 100.0), strict=True):
            self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")
            self.norms.append(float(self.trainer.strategy.grad_norm))  # pyright: ignore[reportAttributeAccessIssue]
        if batch_idx != 1:
            for optimizer in optimizers:
                optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([w], lr=1.0, fused=self.fused) for w in (self.first, self.second)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_are_clipped_by_hand_are_unscaled_once(fused):
    module = Clipping(fused=fused)
    fit_four_batches(module)
    one, two = 3 / 2**0.5, 4 / 2**0.5  # norms of (1.5, 1.5) and (2, 2)
    assert module.norms == pytest.approx([one, two] * 3)
    assert float(module.first.detach().norm()) == pytest.approx(2 * 1.0)  # of two steps
    assert float(module.second.detach().norm()) == pytest.approx(2 * two)
