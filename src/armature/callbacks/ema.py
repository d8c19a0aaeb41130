"""An exponential moving average of the weights (Polyak and Juditsky 1992; arXiv:1803.05407), under
any strategy.

Each rank averages the part of the weights that it holds. The average is saved in checkpoints,
beside the weights.
"""

# pyright: reportPrivateImportUsage=false
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn
from typing_extensions import override

from armature.strategies.base import StrategyMixin
from armature.training.progress import completed_batches


class EMA(L.Callback):
    """Keep the average of the weights over optimizer steps, and evaluate with it.

    Args:
        decay: weight of the past; 0.999 averages over about a thousand steps. After n steps it is
            at most (1 + n) / (10 + n), so that the average forgets the initial weights.
        evaluate: validate and test with the average; training always continues with the weights
            themselves. Buffers, such as BatchNorm's running statistics, are the model's own.
    """

    unsupported_strategies: ClassVar[dict[str, str]] = {  # read from the source before launch
        "zero3": "its weights are in pieces that have no names. Type strategy=fsdp, or leave the "
        "average out"
    }

    def __init__(self, *, decay: float = 0.999, evaluate: bool = True) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay must lie between 0 and 1. Got {decay}")
        self.decay, self.evaluate = decay, evaluate
        self.steps = 0
        self.average: dict[str, Tensor] = {}
        self._strategy: StrategyMixin
        self._weights: dict[str, Tensor] = {}  # all that is averaged
        self._replaced: dict[str, Tensor] = {}  # the weights, while the average is in their place
        self._seen_step = 0

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._strategy = StrategyMixin.of(trainer)
        self._weights = {**self._strategy.trained_weights()}
        self._begin()
        # before a checkpoint is loaded, so that the average is loaded too
        self._strategy.register_extra_state("ema", lambda: self.average)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.steps:
            self._begin()  # the checkpoint has no average: begin with the weights that were loaded
        self._seen_step = completed_batches(trainer)

    def _begin(self) -> None:
        self.average = {
            name: param.detach().float().clone() for name, param in self._weights.items()
        }

    @override
    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if completed_batches(trainer) == self._seen_step:
            return  # still accumulating
        self._seen_step = completed_batches(trainer)
        if self._strategy.left_out:
            return
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        self.steps += 1
        local = self._strategy.local
        weights = [local(self._weights[name]).float() for name in self.average]
        averages = [local(average) for average in self.average.values()]
        get_ema_multi_avg_fn(decay)(averages, weights, None)

    @override
    @torch.no_grad()
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not (self.evaluate and self.steps and self.average):  # none without a fit
            return
        self._strategy = StrategyMixin.of(trainer)
        local = self._strategy.local
        for name, weight in self._strategy.trained_weights().items():
            self._replaced[name] = local(weight).clone()
            local(weight).copy_(local(self.average[name]))

    @override
    @torch.no_grad()
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._replaced:
            return
        for name, weight in self._strategy.trained_weights().items():
            self._strategy.local(weight).copy_(self._replaced.pop(name))

    on_test_start, on_test_end = on_validation_start, on_validation_end

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        # a checkpoint that is saved after this hook must hold the weights
        self.on_validation_end(trainer, pl_module)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]
