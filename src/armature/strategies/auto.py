"""The strategy for any number of processes. Only the chosen class is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from armature.launcher import environment

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy


def auto(*, seed: int = 0, **options: Any) -> Strategy:
    """Return `single` for one process, `ddp` for several."""
    if environment.world_size() == 1:
        from armature.strategies.single import SingleDevice

        names = ("activation_checkpointing", "compile", "compile_mode", "float8")
        return SingleDevice(seed=seed, **{name: value for name, value in options.items() if name in names})
    from armature.strategies.ddp import DDP

    return DDP(seed=seed, **options)
