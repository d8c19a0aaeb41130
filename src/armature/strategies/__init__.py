"""How a model is divided over processes: `configs/strategy/` names these. What is not used is not imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from armature.launcher import environment

if TYPE_CHECKING:  # also what the check of a `_target_` before launch reads
    from lightning.pytorch.strategies import Strategy

    from armature.strategies.ddp import DDP  # noqa: F401
    from armature.strategies.deepspeed import DeepSpeed  # noqa: F401
    from armature.strategies.mesh import MeshStrategy  # noqa: F401
    from armature.strategies.single import SingleDevice  # noqa: F401

_WHERE = {"SingleDevice": "single", "DDP": "ddp", "MeshStrategy": "mesh", "DeepSpeed": "deepspeed"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)


def auto(*, seed: int = 0, **options: Any) -> Strategy:
    """`single` for one process, `ddp` for more."""
    if environment.world_size() == 1:
        names = ("activation_checkpointing", "compile", "compile_mode", "float8")
        shared = {k: v for k, v in options.items() if k in names}
        return __getattr__("SingleDevice")(seed=seed, **shared)
    return __getattr__("DDP")(seed=seed, **options)
