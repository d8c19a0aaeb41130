"""data.micro_batch_size=auto: what follows when memory runs out in a training step.

Nothing of the failed attempt is kept: the launcher restarts the ranks with the smaller size, from
the newest checkpoint, as after any other failure. Random state, BatchNorm's statistics, metrics,
gradients and whatever a module or a callback counts are then as if the larger micro-batch had not
been tried.
"""

import traceback
from pathlib import Path

from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf

from armature import run_dir
from armature.parallel import process_group
from armature.training.errors import place
from armature.training.loops import EpochLoop
from armature.training.progress import completed_batches, feed_of
from armature.validation import micro_batch
from armature.validation.memory import overrides


def smaller(
    cfg: DictConfig, error: BaseException, trainer: Trainer, kinds: dict[str, float]
) -> str | None:
    """Record a smaller size in config.yaml and return a line that says so; None if none is to be
    tried.

    `kinds`: the bytes that this rank has held, by kind.

    It is not where the size was typed, nor after an error outside of training steps, such as in
    validation, whose batches are of data.eval_batch_size.
    """
    codes = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    if not (
        micro_batch.is_auto(cfg)
        and EpochLoop.advance.__code__ in codes
        and trainer.lightning_module.automatic_optimization
    ):
        return None
    batches = feed_of(trainer).batches
    if (size := micro_batch.smaller(cfg, batches)) is None:
        return None
    run_dir.record_micro_batch_size(Path(cfg.run.dir), size)
    others = [
        each for each in overrides(cfg, kinds=kinds) if not each.startswith("data.micro_batch_size")
    ]
    keep = f", or {others[0]} to keep {batches.micro_batch_size}" if others else ""
    peak = sum(kinds.values()) / 2**30
    return (
        f"Memory ran out on {place(trainer)} in step {completed_batches(trainer) + 1} (peak "
        f"{peak:.2f} GiB): micro-batch {batches.micro_batch_size} → {size}, with the same "
        f"global batch of {batches.global_batch_size}. Type data.micro_batch_size={size} to start "
        f"with it{keep}."
    )


def agree(cfg: DictConfig) -> None:
    """Take the smallest size that any rank's config.yaml has: each machine may have a run directory
    of its own.
    """
    sizes = process_group.all_gather_object(OmegaConf.select(cfg, "run.micro_batch_size"))
    if found := [size for size in sizes if size is not None]:
        cfg.run.micro_batch_size = min(found)
