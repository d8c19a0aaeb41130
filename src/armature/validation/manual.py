"""What manual optimization excludes, found from the task's source before launch."""

from __future__ import annotations

from omegaconf import DictConfig

from armature.layout import Layout
from armature.validation.signatures import assigns


def problems(cfg: DictConfig) -> list[str]:
    """Return the settings that a task with `self.automatic_optimization = False` cannot be trained with."""
    target = cfg.task._target_
    if not assigns(target, "automatic_optimization", False):
        return []
    found, why = [], f"{target} optimizes manually (self.automatic_optimization = False)"
    clip, micro = cfg.trainer.gradient_clip_val, cfg.data.get("micro_batch_size", "auto")
    if clip not in (None, "auto"):
        found.append(
            f"trainer.gradient_clip_val={clip}: {why}, where Lightning does not clip. Leave it out, and call "
            "self.clip_gradients(optimizer, gradient_clip_val=…) before optimizer.step()."
        )
    layout = Layout.of(cfg)
    size = cfg.data.get("global_batch_size")
    if isinstance(micro, int) and isinstance(size, int) and micro * layout.data_ranks < size:
        found.append(
            f"data.micro_batch_size={micro}: {why}, so it decides itself when to step, and a global batch of {size} "
            "cannot be accumulated. Type data.micro_batch_size=auto."
        )
    if layout.axes.get("pipe", 1) > 1:
        found.append(f"strategy: {why}, and a pipeline makes the steps itself. Type strategy=ddp or strategy=fsdp.")
    return found
