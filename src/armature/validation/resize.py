"""The same run on fewer ranks: which number still composes, and what of the configuration follows it. Torch-free."""

import json
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from armature.parallel import mesh
from armature.validation import checks
from armature.validation import parallelism as parallel_checks

FOLLOWS = ("trainer.devices", "data.micro_batch_size")  # what changes with the number of ranks


def fewer(cfg: DictConfig, *, most: int, least: int) -> DictConfig | str:
    """The configuration on the largest number of devices from `most` down to `least`; why not, where there is none.

    What the optimizer sees stays as it is: data.global_batch_size is kept, and accumulation follows. So that a rank
    needs no more memory than before, data.micro_batch_size is kept too; where it no longer divides, the nearest one
    below that does is taken.
    """
    problems: list[str] = []
    for devices in range(most, least - 1, -1):
        candidate = cfg.copy()
        candidate.trainer.devices = devices
        for micro in _micro_batch_sizes(cfg, candidate):
            candidate.data.micro_batch_size = micro
            if not (problems := checks.layout_problems(candidate)):
                return candidate
    return _fixed(cfg) or (problems[0] if problems else f"launch.min_ranks={least}")


def difference(asked: DictConfig, cfg: DictConfig) -> str:
    """What a rank must know beyond the run directory's configuration, as text for an environment variable."""
    there = {key: OmegaConf.select(cfg, key) for key in FOLLOWS}
    return json.dumps({key: value for key, value in there.items() if value != OmegaConf.select(asked, key)})


def apply(cfg: DictConfig, text: str) -> None:
    """Changes a configuration by what `difference` wrote."""
    for key, value in json.loads(text or "{}").items():
        OmegaConf.update(cfg, key, value)


def _micro_batch_sizes(cfg: DictConfig, candidate: DictConfig) -> Iterator[int | str]:
    """From the one that a rank has now to the least like it; smaller ones first."""
    size, now = cfg.data.global_batch_size, cfg.data.micro_batch_size
    share, rest = divmod(size, checks.data_size(candidate))
    if rest:
        yield now
        return
    micro = size // checks.data_size(cfg) if now == "auto" else now
    divisors = [n for n in range(1, share + 1) if share % n == 0]
    yield from sorted(divisors, key=lambda n: (n > micro, abs(n - micro)))


def _fixed(cfg: DictConfig) -> str | None:
    """Which axis of a mesh holds the number of ranks."""
    strategy = checks.plain(cfg.strategy)
    if parallel_checks.kind(strategy, world_size=2) != "mesh" or "auto" in (strategy[axis] for axis in mesh.AXES):
        return None
    longest = max(reversed(mesh.AXES), key=lambda axis: strategy[axis] if axis in ("shard", "replicate") else 0)
    return f"strategy.{longest}={strategy[longest]} is fixed, type strategy.{longest}=auto"
