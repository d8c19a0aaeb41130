"""Batch arithmetic. Torch-free: it checks the command line before anything heavy is imported."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from armature.errors import ConfigError
from armature.models.sizes import nearest_divisor, nearest_multiple

# of `data`, which the feed takes (data/feed.py)
LOADER_KEYS = (
    "global_batch_size",
    "micro_batch_size",
    "eval_batch_size",
    "num_workers",
    "seed",
    "train_limit",
    "skip_steps",
)
FOLD_KEYS = ("fold", "folds")  # of any data module (data/folds.py)


@dataclass(frozen=True)
class Batches:
    """The split of one optimizer step's samples: global = micro × accumulate × data ranks."""

    global_batch_size: int
    micro_batch_size: int
    accumulate: int
    data_ranks: int


def plan_batches(
    global_batch_size: int,
    micro_batch_size: int | str,
    data_ranks: int,
    *,
    key: str = "data.global_batch_size",
) -> Batches:
    """Return the batch sizes, with the accumulation that follows from them and the size of the data
    axis.

    Tensor and pipeline ranks see the same samples and do not count. "auto" makes a rank's whole
    share one micro-batch. `key` is where the global batch was typed. Raises ConfigError, with the
    nearest values that fit, if global is not a multiple of micro × data ranks.
    """
    auto = micro_batch_size == "auto"
    unit = data_ranks * (1 if auto else int(micro_batch_size))
    if global_batch_size % unit:
        micro = "" if auto else f"data.micro_batch_size={micro_batch_size} × "
        share, rest = divmod(global_batch_size, data_ranks)
        remedies = [f"{key}={nearest_multiple(global_batch_size, unit)}"]
        if not rest:
            fits = nearest_divisor(share, int(micro_batch_size))
            remedies.append(f"data.micro_batch_size={fits}")
        raise ConfigError(
            f"{key}={global_batch_size} is not a multiple of {micro}{data_ranks} data "
            f"rank{'s' * (data_ranks > 1)}. Type {' or '.join(remedies)}."
        )
    micro_batch_size = global_batch_size // data_ranks if auto else int(micro_batch_size)
    return Batches(
        global_batch_size, micro_batch_size, 1 if auto else global_batch_size // unit, data_ranks
    )


def configured_batch_size(data: Mapping[str, Any]) -> int | None:
    """Return the global batch of a `data` group, or None if only the loaders of a plain
    LightningDataModule know it.
    """
    sizes = (data.get("global_batch_size"), data.get("batch_size"))
    return next((size for size in sizes if isinstance(size, int)), None)
