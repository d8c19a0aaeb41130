"""Armature: one LightningModule, any parallelism, one word to change."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    import lightning.pytorch as L
    import torch
    from omegaconf import DictConfig

__version__ = "1.0.0"

if "hydra" in sys.modules:  # so that Hydra's own compose("train") works in a notebook
    from armature import config as config


def compose(*overrides: str) -> DictConfig:
    """Return the checked configuration that a command line would train.

    `armature.compose("experiment=digits")`.
    """
    from armature import cli
    from armature.training.limits import prefer_typed
    from armature.validation.checks import check

    return check(prefer_typed(cli.compose(overrides), list(overrides)), prepare=False)


def load(path: str | Path, **options: Any) -> L.LightningModule:
    """Return a trained LightningModule, ready for inference: `armature.load("outputs/mine",
    device="cuda")`.

    See `armature.loading.load` for the options. It is imported here, since it imports torch.
    """
    from armature import loading

    return loading.load(path, **options)


def whole_weights(module: torch.nn.Module) -> AbstractContextManager[None]:
    """Within `with armature.whole_weights(self.net):` the weights and their gradients are
    ordinary, whole tensors.

    What is changed is written back; all ranks must make the same change. All ranks must enter it;
    rank 0 alone may write files inside. No module inside may be called there: its forward would
    gather the weights as they were. Under a pipeline, a rank has the weights of its stages.
    """
    from armature.parallel import whole_weights

    return whole_weights.gathered(module)


def full_state_dict(module: L.LightningModule, *, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the unsharded weights and saved buffers on rank 0, under any strategy; nothing on
    other ranks.

    All ranks must call it: `weights = armature.full_state_dict(self, prefix="net.")`, then
    `torch.save` on rank 0.

    Args:
        module: the LightningModule of a run.
        prefix: of the names to take, which is removed from them.
    """
    from armature.checkpoint import state

    return state.full_state_dict(module, prefix=prefix)
