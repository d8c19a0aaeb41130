"""Norms of weights, gradients and updates under any strategy, each n steps: they do not wait for the device."""

# pyright: reportPrivateImportUsage=false

import logging
from typing import Any

import lightning as L
import torch
from torch import Tensor

from armature.callbacks.ema import local
from armature.parallel import gradients, process_group

log = logging.getLogger(__name__)


class Norms:
    """What `Monitors` knows of the weights; its constructor says what the arguments mean."""

    def __init__(self, every_n_steps: int, *, by_part: bool, update_ratio: bool) -> None:
        self.every_n_steps, self.by_part, self.update_ratio = every_n_steps, by_part, update_ratio
        self.parts: list[str] = []
        self._weights: dict[str, Tensor] = {}
        self._groups: list[int] = []
        self._columns: dict[str, Tensor] = {}
        self._before: list[Tensor] = []
        self._with_gradients = by_part

    def begin(self, trainer: L.Trainer) -> None:
        strategy: Any = trainer.strategy
        self._weights = strategy.weights()
        if any(hasattr(weight, "ds_status") for weight in self._weights.values()):
            log.warning("DeepSpeed's ZeRO-3 keeps its weights to itself: there are no norms of them.")
            self._weights = {}
        if self.by_part and (strategy.handles_gradient_accumulation or self._is_scaled(strategy)):
            log.warning("DeepSpeed and 16-mixed keep gradients to themselves: there are no norms of them by part.")
            self._with_gradients = False
        names = {part_of(name) for name in self._weights} if self.by_part else {""}
        self.parts = sorted({name for of_rank in process_group.all_gather_object(names) for name in of_rank})
        self._groups = [self.parts.index(part_of(name) if self.by_part else "") for name in self._weights]

    @staticmethod
    def _is_scaled(strategy: Any) -> bool:
        return getattr(strategy.precision_plugin, "scaler", None) is not None

    def _due(self, step: int) -> bool:
        return bool(self._weights) and step % self.every_n_steps == 0

    def before_step(self, trainer: L.Trainer) -> None:
        """Before clipping, while the gradients are whole."""
        if not self._due(trainer.global_step + 1):
            return
        if self._with_gradients:
            with_gradient = [i for i, weight in enumerate(self._weights.values()) if weight.grad is not None]
            weights = list(self._weights.values())
            parts = [part for i in with_gradient for part in gradients.local_gradients([weights[i]])]
            of_parts = self._of(trainer, parts, [self._groups[i] for i in with_gradient])
            strategy: Any = trainer.strategy
            scale = None if strategy.gradients_are_scaled else strategy.gradient_scale()
            of_parts = of_parts if scale is None else of_parts * scale
            self._columns |= self._named("train/grad_norm", of_parts)
        if self.update_ratio:
            self._before = [local(weight).detach().clone() for weight in self._weights.values()]

    def after_step(self, trainer: L.Trainer) -> dict[str, Tensor]:
        """The columns of a step that has been made; empty between the steps that are due."""
        if not self._due(trainer.global_step):
            return {}
        parts = gradients.local_parts(self._weights.values())
        of_weights = self._of(trainer, parts, self._groups)
        self._columns["train/weight_norm"] = of_weights[-1]
        self._columns |= self._named("train/weight_norm", of_weights)
        if self._before:
            changes = torch._foreach_sub([part for part, _ in parts], self._before)
            change = self._of(trainer, [(c, cuts) for c, (_, cuts) in zip(changes, parts, strict=True)], self._groups)
            self._columns["train/update_ratio"] = change[-1] / of_weights[-1]
            self._before = []
        columns, self._columns = self._columns, {}
        return columns

    def _of(self, trainer: L.Trainer, parts: list[tuple[Tensor, int]], groups: list[int]) -> Tensor:
        strategy: Any = trainer.strategy
        return gradients.norms(
            parts, groups, count=len(self.parts), ranks=strategy.ranks_per_stage, sharded=strategy.divided,
            device=strategy.root_device,
        )  # fmt: skip

    def _named(self, prefix: str, of_parts: Tensor) -> dict[str, Tensor]:
        return {f"{prefix}/{part}": of_parts[i] for i, part in enumerate(self.parts)} if self.by_part else {}


def part_of(name: str) -> str:
    """The block or end a weight belongs to: blocks.3 of model.blocks.3.ffn.up.weight, head of model.head.weight."""
    _, *inner = name.split(".")
    if not inner:
        return name
    return ".".join(inner[:2]) if len(inner) > 2 and inner[1].isdigit() else inner[0]
