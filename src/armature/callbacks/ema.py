"""An exponential moving average of the weights (Polyak and Juditsky 1992; arXiv:1803.05407), under any strategy.

Each rank averages the part of the weights that it holds. The average is in the checkpoint, beside the weights.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override


class EMA(L.Callback):
    """Keeps the average of the weights over optimizer steps, and evaluates with it.

    Args:
        decay: weight of the past; 0.999 averages over about a thousand steps. Early on it is less, (1 + n) / (10 + n)
            after n steps, so that the average does not remember the initial weights.
        evaluate: validate and test with the average; training always goes on with the weights themselves.
    """

    unsupported_strategies: ClassVar[dict[str, str]] = {  # read from the source before launch
        "zero3": "its weights are in pieces that have no names. Type strategy=fsdp, or leave the average out"
    }

    def __init__(self, *, decay: float = 0.999, evaluate: bool = True) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay must lie between 0 and 1. Got {decay}")
        self.decay, self.evaluate = decay, evaluate
        self.steps = 0
        self.average: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._kept: dict[str, Tensor] = {}
        self._seen = 0

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._weights = trainer.strategy.weights()  # pyright: ignore[reportAttributeAccessIssue]
        self._begin()
        # before a checkpoint is loaded, so that it is loaded into the average too
        trainer.strategy.extra_state["ema"] = lambda: self.average  # pyright: ignore[reportAttributeAccessIssue]

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.steps == 0:
            self._begin()  # a run that had no average until now begins with the weights it was resumed with
        self._seen = trainer.global_step

    def _begin(self) -> None:
        self.average = {name: param.detach().float().clone() for name, param in self._weights.items()}

    @override
    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self._seen:
            return  # still accumulating
        self._seen = trainer.global_step
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        self.steps += 1
        weights = [local(self._weights[name]).float() for name in self.average]
        torch._foreach_lerp_([local(average) for average in self.average.values()], weights, 1 - decay)

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._swap_in(trainer)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._swap_out(trainer)

    @override
    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._swap_in(trainer)

    @override
    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._swap_out(trainer)

    @torch.no_grad()
    def _swap_in(self, trainer: L.Trainer) -> None:
        if not self.evaluate or self.steps == 0:
            return
        for name, param in trainer.strategy.weights().items():  # pyright: ignore[reportAttributeAccessIssue]
            self._kept[name] = local(param).clone()
            local(param).copy_(local(self.average[name]))

    @torch.no_grad()
    def _swap_out(self, trainer: L.Trainer) -> None:
        if not self._kept:
            return
        for name, param in trainer.strategy.weights().items():  # pyright: ignore[reportAttributeAccessIssue]
            local(param).copy_(self._kept.pop(name))

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._swap_out(trainer)  # a checkpoint that is saved on the way out holds the weights

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be divided over ranks."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue]
