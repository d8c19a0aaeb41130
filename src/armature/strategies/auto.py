"""The strategy for any number of processes. Only the chosen class is imported."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy


def auto(*, seed: int = 0, **options: Any) -> Strategy:
    """Return `single` for one process, `ddp` for several."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        from armature.strategies.single import SingleDevice

        names = ("activation_checkpointing", "compile", "compile_mode", "float8")
        return SingleDevice(seed=seed, **{name: value for name, value in options.items() if name in names})
    from armature.strategies.ddp import DDP

    return DDP(seed=seed, **options)
