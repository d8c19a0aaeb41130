"""Batch arithmetic. Torch-free: it checks the command line before anything heavy is imported."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from armature.errors import ConfigError

# Arguments of our DataModule. data/adapter.py takes them for a plain LightningDataModule, which has
# no such arguments
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
    problems = []
    if global_batch_size < 1:
        problems.append(f"{key}={global_batch_size}: at least 1 sample per step is needed.")
    if micro_batch_size != "auto" and (
        not isinstance(micro_batch_size, int) or micro_batch_size < 1
    ):
        problems.append(
            f"data.micro_batch_size={micro_batch_size}: type a number of samples of at least 1, or "
            "auto."
        )
    if problems:
        raise ConfigError(problems)
    if micro_batch_size == "auto":
        if global_batch_size % data_ranks:
            raise ConfigError(
                f"{key}={global_batch_size} does not divide among {data_ranks} data ranks. "
                f"{_type(key, _nearest_multiples(global_batch_size, data_ranks))}"
            )
        micro_batch_size = global_batch_size // data_ranks
    assert isinstance(micro_batch_size, int)
    accumulate, rest = divmod(global_batch_size, micro_batch_size * data_ranks)
    if rest or not accumulate:
        remedy = _type(key, _nearest_multiples(global_batch_size, micro_batch_size * data_ranks))
        if global_batch_size % data_ranks == 0:
            micro = _nearest_divisors(micro_batch_size, global_batch_size // data_ranks)
            remedy = f"{_type('data.micro_batch_size', micro)} {remedy}"
        raise ConfigError(
            f"{key}={global_batch_size} is not a multiple of "
            f"data.micro_batch_size={micro_batch_size} "
            f"× {data_ranks} data rank{'s' * (data_ranks > 1)}. {remedy}"
        )
    return Batches(global_batch_size, micro_batch_size, accumulate, data_ranks)


def configured_batch_size(data: Mapping[str, Any]) -> int | None:
    """Return the global batch of a `data` group, or None if only the loaders of a plain
    LightningDataModule know it.
    """
    sizes = (data.get("global_batch_size"), data.get("batch_size"))
    return next((size for size in sizes if isinstance(size, int)), None)


def _type(key: str, values: list[int]) -> str:
    return f"Type {' or '.join(f'{key}={value}' for value in values)}."


def _nearest_multiples(value: int, of: int) -> list[int]:
    below = value // of * of
    return [below, below + of] if below else [of]


def _nearest_divisors(value: int, of: int) -> list[int]:
    """Return the largest divisor of `of` below `value`, and the smallest above it."""
    divisors = sorted({d for i in range(1, int(of**0.5) + 1) if of % i == 0 for d in (i, of // i)})
    below, above = [d for d in divisors if d < value], [d for d in divisors if d > value]
    return below[-1:] + above[:1]
