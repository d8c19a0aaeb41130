"""What manual optimization excludes: found from the task's source before launch, and from the task
itself in a rank.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from armature.data import batching
from armature.errors import ConfigError
from armature.layout import Layout
from armature.validation.signatures import assigns


def problems(cfg: DictConfig, layout: Layout) -> list[str]:
    """Return the settings that a task with `self.automatic_optimization = False` cannot be trained
    with.
    """
    target = cfg.task._target_
    if not assigns(target, "automatic_optimization", False):
        return []
    micro, size = cfg.data.micro_batch_size, batching.configured_batch_size(cfg.data)
    accumulates = (
        isinstance(micro, int) and isinstance(size, int) and micro * layout.data_ranks < size
    )
    clip, accumulated = cfg.trainer.gradient_clip_val, size if accumulates else None
    found = setting_problems(
        target, clip=clip, micro=micro, size=accumulated, on_nan=cfg.trainer.on_nan
    )
    if layout.axes.get("pipe", 1) > 1:
        found.append(
            f"strategy: {target} optimizes manually, and a pipeline makes the steps itself. Type "
            "strategy=ddp or strategy=fsdp."
        )
    return found


def setting_problems(
    name: str, *, clip: Any, micro: Any, size: int | None, on_nan: str
) -> list[str]:
    """Return what is wrong with a task that optimizes manually.

    Args:
        clip: trainer.gradient_clip_val.
        micro: data.micro_batch_size.
        size: the global batch if it would be accumulated from micro-batches, else None.
        on_nan: trainer.on_nan.
    """
    found, why = [], f"{name} optimizes manually (self.automatic_optimization = False)"
    if clip not in (None, "auto"):
        found.append(
            f"trainer.gradient_clip_val={clip}: {why}, where Lightning does not clip. Leave it "
            "out, and call "
            "self.clip_gradients(optimizer, gradient_clip_val=…) before optimizer.step()."
        )
    if size is not None:
        found.append(
            f"data.micro_batch_size={micro}: {why}, so it decides itself when to step, and a "
            f"global batch of {size} cannot be accumulated. Type data.micro_batch_size=auto."
        )
    if on_nan == "skip":
        found.append(
            f"trainer.on_nan=skip: {why}, so its updates cannot be left out. Type "
            "trainer.on_nan=stop."
        )
    return found


def check_unchanged(automatic: bool, accumulate: int, trainer: Any) -> None:
    """Raise ConfigError if `automatic_optimization` or the accumulation is not what it was when the
    run was built.
    """
    if (set_to := trainer.accumulate_grad_batches) != accumulate:
        raise ConfigError(
            f"trainer.accumulate_grad_batches was {accumulate} and is {set_to} now: your code has "
            "set it. Here it is data.global_batch_size / (data.micro_batch_size × data ranks) in "
            "every step, which positions in the data and checkpoints count by. Type both instead."
        )
    module = trainer.lightning_module
    if (now := module.automatic_optimization) != automatic:
        raise ConfigError(
            f"{type(module).__name__}.automatic_optimization was {automatic} after __init__ and is "
            f"{now} now. The limit of steps, clipping and accumulation follow from its value after "
            f"__init__. Set self.automatic_optimization = {now} there."
        )
