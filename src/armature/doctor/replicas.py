"""What ranks that hold the same part of the model must have alike: weights, gradients and batches,
to the bit.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from armature.doctor.finding import Finding, failure, listed_ranks

GROUP = "gradients"
CHUNK = 2**24  # elements that are summed at once
# name → which part of it, and a fingerprint of its bits
Prints = dict[str, tuple[tuple[int, ...], str]]


def fingerprint(tensor: Tensor) -> str:
    """Return a fingerprint of a tensor's bits, computed on its device: equal for equal bits, in any
    order of the sums.

    Two sums over the bits as whole numbers, one of them weighted by position, so that exchanged
    elements show.
    """
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    width = next(width for width in (4, 2, 1) if bits.numel() % width == 0)
    words = bits.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[width])
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), CHUNK):
        part = words[start : start + CHUNK].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + part.numel(), device=part.device)
        total += torch.stack([part.sum(), (part * places).sum()])
    return f"{tuple(tensor.shape)}/{tensor.dtype}/{total.tolist()}"


def prints(tensors: Mapping[str, Tensor | None]) -> Prints:
    """Return this rank's fingerprints by name; a tensor that is None is left out."""
    found: Prints = {}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        part: tuple[int, ...] = ()
        if isinstance(tensor, DTensor):
            coordinate = tensor.device_mesh.get_coordinate() or ()
            cut = zip(coordinate, tensor.placements, strict=True)
            part = tuple(-1 if placement.is_replicate() else place for place, placement in cut)
            tensor = tensor.to_local()
        found[name] = (part, fingerprint(tensor))
    return found


def difference(
    what: str, everyones: Sequence[Prints], *, name: Callable[[int], str]
) -> Iterator[Finding]:
    """Name the first tensor of which two ranks hold the same part with different bits, and those
    ranks.

    Args:
        what: gradient or weight.
        everyones: the fingerprints of each rank, in order of ranks.
    """
    order = list(dict.fromkeys(key for each in everyones for key in each))
    wrong = [key for key in order if not _agree(key, everyones)]
    if not wrong:
        return
    first = next(groups for groups in _by_part(wrong[0], everyones).values() if len(groups) > 1)
    parties = " from ".join(listed_ranks(ranks) for ranks in first.values())
    more = f" {len(wrong) - 1} more differ after it." if len(wrong) > 1 else ""
    yield failure(
        GROUP,
        f"The {what} of {wrong[0]} differs between replicas: {parties}.{more}",
        remedy="It is left out of the synchronization of gradients, or computed by rank-dependent "
        "code: look for "
        "parameters not registered in the module, for _ddp_params_and_buffers_to_ignore, no_sync, "
        "param.data = …, "
        "and for random numbers outside of torch's generators.",
        where=name(next(iter(next(iter(first.values()))))),
    )


def _agree(key: str, everyones: Sequence[Prints]) -> bool:
    return all(len(groups) == 1 for groups in _by_part(key, everyones).values())


def _by_part(key: str, everyones: Sequence[Prints]) -> dict[tuple[int, ...], dict[str, list[int]]]:
    """Return, for each part of a tensor, the ranks that hold it by fingerprint."""
    found: dict[tuple[int, ...], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, each in enumerate(everyones):
        if key in each:
            part, bits = each[key]
            found[part][bits].append(rank)
    return found


# ------------------------------------------------------------ batches
def batch_print(batch: Any) -> str:
    """Return a fingerprint of all tensors in a batch."""
    return hashlib.sha256(
        "\n".join(fingerprint(each) for each in tensors_in(batch)).encode()
    ).hexdigest()


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterable[Tensor]:
    """Return the tensors in nested containers and objects, which may refer to each other."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each, seen)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, type) and id(value) not in seen:
        # a dataclass, a graph
        seen.add(id(value))
        yield from tensors_in(vars(value), seen)


def batch_findings(batches: Sequence[tuple[int, str]]) -> Iterator[Finding]:
    """Compare the first batch of each rank: equal on ranks of one place on the data axis, different
    elsewhere.

    Args:
        batches: place on the data axis and fingerprint, in order of ranks.
    """
    by_place: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    by_print: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, (place, bits) in enumerate(batches):
        by_place[place][bits].append(rank)
        by_print[bits][place].append(rank)
    for groups in by_place.values():
        if len(groups) > 1:
            parties = " and ".join(listed_ranks(ranks) for ranks in groups.values())
            yield failure(
                "data",
                f"{parties} must train on the same samples (they share a tensor or pipeline "
                "group), but their batches "
                "differ.",
                remedy="The data module draws random numbers that depend on the rank, or divides "
                "its data by "
                "torch.distributed's rank: use armature's loaders, or "
                "trainer.strategy.distributed_sampler_kwargs.",
            )
            return
    for places in by_print.values():
        if len(places) > 1:
            parties = " and ".join(listed_ranks(ranks) for ranks in places.values())
            yield failure(
                "data",
                f"{parties} train on the same samples: each must have its own part of the global "
                "batch.",
                remedy="The data module serves the same batches on every rank: leave the sampler "
                "to armature (no "
                "batch_sampler of your own, no IterableDataset that ignores the rank).",
            )
            return
