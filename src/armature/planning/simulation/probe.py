"""Callbacks that watch one simulated optimizer step, and end the run after it."""

from typing import Any

import lightning.pytorch as L
import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from armature.checkpoint import optimizers
from armature.parallel.gradients import split_groups
from armature.planning.simulation.meter import Meter
from armature.training.run_hooks import RunHooks

HELD: tuple[str, ...] = ("parameters", "gradients", "optimizer state")
PHASES = {"forward": "activations", "backward": "temporary", "optimizer": "temporary"}


def _create_state(optimizer: Optimizer) -> None:
    """Let an optimizer create its state, by a step without gradients at rate 0."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        for param in group["params"]:
            param.grad = torch.zeros_like(param) if param.requires_grad else None
    with split_groups(optimizer):
        optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()


class StepEnded(BaseException):
    """Ends the run after the measured step."""


class Probe(RunHooks, L.Callback):
    """Tells the meter what is happening, and ends the run after the measured step.

    That is the first one; of a pipeline the second, since in the first torch runs each stage once
    more to learn shapes. The optimizer's state is created before that step: later steps have it
    from the start. The middle one of several micro-batches counts for all that are left out
    (`repeats`). Of a validation before it the last batch counts: in the first one a pipeline's
    stages tell each other what shapes they send.
    """

    def __init__(self, meter: Meter, *, logits: frozenset[int], steps_before: int) -> None:
        self.meter, self.logits = meter, logits
        self.result: dict[str, Any] | None = None
        self.batches: list[dict[str, Any]] = []
        self.validation_syncs: dict[str, float] = {}
        self.first_batch: Any = None
        self.steps_before = steps_before
        self._begins = steps_before  # the measured step, counted from 0

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        meter = self.meter
        for param in pl_module.parameters():
            meter.own(param.data, "parameters")
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._graded)
        for optimizer in trainer.optimizers:
            if not optimizers.needs_closure(optimizer):
                with meter.during("setup", "optimizer state"):
                    _create_state(optimizer)
            self._own_state(optimizer)
        meter.logits = self.logits

    def _graded(self, param: torch.Tensor) -> None:
        if param.grad is not None and not (
            isinstance(param, DTensor) and not isinstance(param.grad, DTensor)
        ):
            self.meter.own(param.grad, "gradients")

    def _own_state(self, optimizer: Any) -> None:
        for values in optimizer.state.values():
            for value in values.values():
                if isinstance(value, torch.Tensor):
                    self.meter.own(value, "optimizer state")

    def _phase(self, name: str) -> None:
        self.meter.phase, self.meter.kind = name, PHASES[name]

    @override
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self._begins * trainer.accumulate_grad_batches:
            self.first_batch, self.batches = batch, []
            self.meter.restart()
        self._phase("forward")

    @override
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self._phase("backward")

    @override
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for param in pl_module.parameters():
            if param.grad is not None:
                self.meter.own(param.grad, "gradients")
        self._phase("optimizer")

    @override
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches.append(counts(self.meter))

    @override
    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.meter.syncs.clear()

    @override
    def on_validation_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.validation_syncs = dict(self.meter.syncs)

    def step_ended(self, trainer: Any) -> None:
        if self.steps_before:
            self.steps_before -= 1
            return
        self.result = counts(self.meter)
        raise StepEnded


def counts(meter: Meter) -> dict[str, Any]:
    """Return a copy of what has been counted so far."""
    return {
        "flops": dict(meter.flops),
        "seconds": dict(meter.seconds),
        "syncs": dict(meter.syncs),
        "operators": meter.operators,
        "volumes": {key: tuple(value) for key, value in meter.volumes.items()},
    }
