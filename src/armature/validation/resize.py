"""The same run on fewer ranks: which number still fits, and which settings follow it.

Torch-free.
"""

import json
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from armature.data import batching
from armature.errors import ConfigError
from armature.layout import Layout
from armature.validation import checks, micro_batch

# what changes with the number of ranks
RESIZED_KEYS = ("trainer.devices", "data.micro_batch_size", "run.micro_batch_size")


def fewer(cfg: DictConfig, *, most: int, least: int) -> DictConfig | str:
    """Return the configuration on the largest number of devices from `most` down to `least`, or why
    none fits.

    The optimizer sees the same batches: data.global_batch_size is kept, and accumulation follows. A
    rank needs no more memory than before: data.micro_batch_size is kept too, or becomes the nearest
    smaller one that divides the batch.
    """
    problems: list[str] = []
    for devices in range(most, least - 1, -1):
        candidate = cfg.copy()
        candidate.trainer.devices = devices
        try:
            data_ranks = Layout.of(candidate).data_ranks
        except ConfigError as error:
            problems = error.problems
            continue
        for micro in _micro_batch_sizes(cfg, data_ranks=data_ranks):
            candidate.data.micro_batch_size = micro
            if not (problems := checks.layout_problems(candidate)):
                # memory may still run out
                if micro_batch.is_auto(cfg) and micro != micro_batch.AUTO:
                    candidate.run.micro_batch_size, candidate.data.micro_batch_size = (
                        micro,
                        micro_batch.AUTO,
                    )
                return candidate
    return problems[0] if problems else f"launch.min_ranks={least}"


def difference(asked: DictConfig, cfg: DictConfig) -> str:
    """Return what a rank must know beyond the run directory's configuration, as JSON for an
    environment variable.
    """
    there = {key: OmegaConf.select(cfg, key) for key in RESIZED_KEYS}
    return json.dumps(
        {key: value for key, value in there.items() if value != OmegaConf.select(asked, key)}
    )


def apply(cfg: DictConfig, text: str) -> None:
    for key, value in json.loads(text or "{}").items():
        OmegaConf.update(cfg, key, value)


def _micro_batch_sizes(cfg: DictConfig, *, data_ranks: int) -> Iterator[int | str]:
    """Yield the divisors of a rank's share of the batch, from the current size to the least
    similar; smaller first.
    """
    size, current = (
        batching.configured_batch_size(cfg.data),
        micro_batch.decided(cfg).data.micro_batch_size,
    )
    share, rest = divmod(size or 0, data_ranks)
    if size is None or rest:  # None: only the loaders of a plain LightningDataModule know it
        yield current
        return
    micro = size // Layout.of(cfg).data_ranks if current == "auto" else current
    divisors = [n for n in range(1, share + 1) if share % n == 0]
    yield from sorted(divisors, key=lambda n: (n > micro, abs(n - micro)))
