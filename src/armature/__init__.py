"""Armature: one LightningModule, any parallelism, one word to change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from armature import config

if TYPE_CHECKING:
    from pathlib import Path

    import lightning.pytorch as L

__version__ = "0.1.0"

config.register()  # Hydra's compose("train") then works in a notebook


def load(path: str | Path, **options: Any) -> L.LightningModule:
    """Return a trained LightningModule, ready for inference: `armature.load("outputs/mine", device="cuda")`.

    See `armature.loading.load` for the options. It is imported here, since it imports torch.
    """
    from armature import loading

    return loading.load(path, **options)
