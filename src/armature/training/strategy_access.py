"""The interface that callbacks have to the strategy, so that they import neither strategies nor
process groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from armature.finetune.lora import Lora


@runtime_checkable
class StrategyAccess(Protocol):
    """Weights, gradients and their norms under any layout.

    `armature.strategies` implements and documents it.
    """

    can_read_weights: bool
    can_read_gradients: bool
    left_out: bool
    left_out_flag: Tensor | None

    def weights(self) -> dict[str, nn.Parameter]: ...
    def names_of_all_ranks(self, names: Iterable[str]) -> list[str]: ...
    def local(self, tensor: Tensor) -> Tensor: ...
    def norms(self, tensors: Sequence[Tensor], groups: Sequence[int], *, count: int) -> Tensor: ...
    def gradient_norms(
        self, params: Sequence[Tensor], groups: Sequence[int], *, count: int
    ) -> Tensor: ...
    def register_extra_state(
        self, name: str, tensors: Callable[[], Mapping[str, Tensor]]
    ) -> None: ...


def trained_weights(strategy: StrategyAccess, module: LightningModule) -> dict[str, nn.Parameter]:
    """Return this rank's part of the weights that may change: with adapters, all others are frozen
    for good.
    """
    adapted = isinstance(getattr(module, "adapter", None), Lora)
    return {
        name: weight
        for name, weight in strategy.weights().items()
        if weight.requires_grad or not adapted
    }


def strategy_of(trainer: Trainer, callback: object) -> StrategyAccess:
    """Return the trainer's strategy, or raise TypeError if it is none of armature.strategies."""
    strategy = trainer.strategy
    if not isinstance(strategy, StrategyAccess):
        raise TypeError(
            f"{type(callback).__name__} needs a strategy of armature.strategies, such as "
            "strategy=ddp or "
            f"strategy=fsdp. Got {type(strategy).__name__}"
        )
    return strategy
