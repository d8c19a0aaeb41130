"""The strategy for any number of processes. Only the chosen class is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from armature.launcher import environment

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy


def auto(
    *,
    seed: int = 0,
    activation_checkpointing: str | float = "none",
    compile: str = "none",
    compile_mode: str = "default",
    float8: bool | str = False,
    backend: str = "auto",
    sync_batchnorm: bool = True,
    find_unused_parameters: bool | None = None,
) -> Strategy:
    """Return `single` for one process, `ddp` for several.

    Each option is named: another one is a mistake.
    """
    options: dict[str, Any] = {
        "seed": seed, "activation_checkpointing": activation_checkpointing, "compile": compile,
        "compile_mode": compile_mode, "float8": float8,
    }  # fmt: skip
    if environment.world_size() == 1:
        from armature.strategies.single import SingleDevice

        return SingleDevice(**options)
    from armature.strategies.ddp import DDP

    return DDP(
        **options,
        backend=backend,
        sync_batchnorm=sync_batchnorm,
        find_unused_parameters=find_unused_parameters,
    )
