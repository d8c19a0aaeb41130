"""Every layout for a number of devices, with the best micro-batch and recomputation of each,
ranked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from omegaconf import DictConfig

from armature.data import batching
from armature.errors import ConfigError
from armature.finetune.check import LORA
from armature.layout import Layout
from armature.planning import layouts, memory, seconds
from armature.planning.auto import HEADROOM, WIDE_BLOCK
from armature.planning.devices import Device
from armature.planning.layouts import Choice
from armature.planning.setup import LANGUAGE_MODELING, Setup, setup_of

# samples per rank that are tried
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
PIECES = (4, 8, 16, 32)  # of a pipeline's micro-batch
ENOUGH_POSITIONS = 16_384  # of a micro-batch, with which a GPU's kernels are busy
# relative difference of throughput below which the simpler layout comes first: predictions are no
# better
NEAR = 0.1
COUNTS = (1, 2, 4, 8, 16, 32, 64)  # devices that are tried if none are named


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout with its micro-batch and recomputation.

    Attributes:
        refused: why it cannot run at all, or None; the other predictions are then of no use.
        words: what to type for it, beside the user's own overrides.
        simulated: whether peak and seconds are the simulator's, else the formulas'.
    """

    choice: Choice
    devices: int
    num_nodes: int
    setup: Setup
    peak_bytes: float
    capacity_bytes: float
    units_per_second: tuple[float, float]
    words: str
    refused: str | None = None
    simulated: bool = False

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.capacity_bytes

    @property
    def other_batch(self) -> bool:
        """Whether the global batch is not the configured one, since that does not divide among the
        ranks.
        """
        return "data.global_batch_size=" in self.words

    @property
    def offloaded(self) -> bool:
        return self.setup.offload or self.setup.offload_optimizer

    @property
    def world_size(self) -> int:
        return self.devices * self.num_nodes

    @property
    def effort(self) -> float:
        """What orders equals: the parts that can go wrong; wide blocks on several machines ask for
        a tensor axis.
        """
        axes, wide = self.setup.axes, self.setup.cost.block >= WIDE_BLOCK and self.num_nodes > 1
        return 1.5 if wide and axes["tensor"] > 1 and axes["pipe"] == 1 else self.choice.effort

    @property
    def rate(self) -> float:
        """The middle of the range of throughput, units per second."""
        return math.sqrt(math.prod(self.units_per_second))

    @property
    def margin(self) -> float:
        """Share of the device that stays free; below 0: what is lacking."""
        return 1 - self.peak_bytes / self.capacity_bytes


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What the user has typed, and a plan keeps: None means that the plan chooses."""

    micro: int | None = None
    recompute: str | None = None


def counts(device: Device, *, devices: int | None, num_nodes: int | None) -> list[tuple[int, int]]:
    """Return (devices per machine, machines) to try.

    ConfigError: more devices than a machine has.
    """
    most = device.devices_per_machine
    if devices is not None and (problem := device.too_many(devices)):
        raise ConfigError(problem)
    if devices is not None or num_nodes is not None:
        return [(devices or most, num_nodes or 1)]
    return [_pair(device, count) for count in COUNTS]


def _pair(device: Device, count: int) -> tuple[int, int]:
    """Return devices per machine and machines of at least `count` devices: several machines are
    whole.
    """
    most = device.devices_per_machine
    return min(count, most), -(-count // most)


def rank(
    cfg: DictConfig, device: Device, pairs: Sequence[tuple[int, int]], *, fixed: Fixed
) -> tuple[list[Candidate], list[Candidate]]:
    """Return the layouts that can run, the fastest that fits first and then those that need least;
    and the refused.
    """
    found = [
        each
        for devices, nodes in pairs
        for each in _of_count(cfg, device, devices, nodes, fixed=fixed)
    ]
    return sort(each for each in found if each.refused is None), [
        each for each in found if each.refused is not None
    ]


def order(each: Candidate, *, fastest: float = 1.0) -> tuple[int, float, float, float, float]:
    """Sort key: what fits with room, what fits, what does not; what keeps the global batch, which
    decides the result; then by throughput, and what is near by simplicity.
    """
    if not each.fits:
        return 2, each.peak_bytes, each.effort, 0.0, 0.0
    steps = (
        math.floor(math.log(fastest / each.rate) / math.log(1 + NEAR)) if fastest > each.rate else 0
    )
    return int(each.margin < HEADROOM), each.other_batch, steps, each.effort, -each.rate


def sort(found: Iterable[Candidate]) -> list[Candidate]:
    """Return candidates from the best to the worst."""
    found = list(found)
    fastest = {
        other: max(
            (each.rate for each in found if each.fits and each.other_batch == other), default=1.0
        )
        for other in (False, True)
    }
    return sorted(found, key=lambda each: order(each, fastest=fastest[each.other_batch]))


def _of_count(
    cfg: DictConfig, device: Device, devices: int, num_nodes: int, *, fixed: Fixed
) -> Iterator[Candidate]:
    shared, plan = device.shared_by(devices), Layout.of(cfg).plan
    count = cfg.model.get(plan.expert_count) if plan is not None and plan.expert_count else None
    experts = count if isinstance(count, int) else 1
    for choice in layouts.choices(devices=devices, num_nodes=num_nodes, experts=experts):
        if device.accelerator == "cpu" and choice.effort > 6:
            continue  # on a CPU there is nothing to offload from, and DeepSpeed has no kernels
        changed = layouts.applied(cfg, choice, devices=devices, num_nodes=num_nodes)
        best = _best(changed, shared, choice, devices=devices, num_nodes=num_nodes, fixed=fixed)
        if best is not None:
            yield best


def _best(
    cfg: DictConfig, device: Device, choice: Choice, *, devices: int, num_nodes: int, fixed: Fixed
) -> Candidate | None:  # fmt: skip
    """Return a layout's fastest variant that fits, or the one that needs least.

    Changes the batch sizes of `cfg`.

    None: it has no formula, as adapters have none under DeepSpeed, or fewer blocks than pipeline
    stages.
    """
    layout = Layout.of(cfg)
    size = batching.configured_batch_size(cfg.data) or layout.data_ranks
    pipe = layout.axes["pipe"]
    pieces = [number for number in PIECES if number >= pipe] if pipe > 1 else [1]
    cfg.data.global_batch_size = batch = _batch(size, layout.data_ranks, fixed, least=pieces[0])
    cfg.data.micro_batch_size = fixed.micro or pieces[0]
    setup = setup_of(cfg, layout)
    if setup is None or setup.cost.blocks < pipe:
        return None
    share = batch // layout.data_ranks
    variants = [
        setup.with_(
            micro=micro, accumulate=share // micro, recompute=recompute, microbatches=number
        )
        for micro in ([fixed.micro] if fixed.micro else MICRO_BATCHES)
        for recompute in ([fixed.recompute] if fixed.recompute else layouts.RECOMPUTE)
        for number in pieces
        if share % micro == 0 and micro % number == 0
    ] or [setup]
    candidates = [
        _candidate(
            each, device, choice, devices=devices, num_nodes=num_nodes, size=size, fixed=fixed
        )
        for each in variants
    ]
    best = min(candidates, key=_variant_order)
    refusals = layouts.refusals(cfg)
    return replace(best, refused=refusals[0] if refusals else None)


def _variant_order(each: Candidate) -> tuple[int, float, float, float]:
    """Sort key of one layout's variants: with room, then by throughput, then with kernels that are
    large enough.
    """
    if not each.fits:
        return 2, each.peak_bytes, 0.0, 0.0
    positions = min(each.setup.micro * each.setup.cost.positions, ENOUGH_POSITIONS)
    return (
        int(each.margin < HEADROOM),
        -round(math.log(each.rate) / math.log(1.02)),
        -positions,
        each.peak_bytes,
    )


def _batch(size: int, data_ranks: int, fixed: Fixed, *, least: int) -> int:
    """Return the global batch, or the smallest multiple above it that divides among the ranks."""
    unit = data_ranks * (fixed.micro or least)
    return size if size % unit == 0 else -(-size // unit) * unit


def _candidate(
    setup: Setup,
    device: Device,
    choice: Choice,
    *,
    devices: int,
    num_nodes: int,
    size: int,
    fixed: Fixed,
) -> Candidate:
    step = seconds.step_seconds(setup, device)
    return Candidate(
        choice=choice,
        devices=devices,
        num_nodes=num_nodes,
        setup=setup,
        peak_bytes=memory.peak(setup).total_bytes,
        capacity_bytes=device.memory_bytes,
        units_per_second=step.units_per_second,
        words=_words(setup, choice, devices=devices, num_nodes=num_nodes, size=size, fixed=fixed),
    )


def _words(
    setup: Setup, choice: Choice, *, devices: int, num_nodes: int, size: int, fixed: Fixed
) -> str:
    words = [choice.words]
    if setup.axes["pipe"] > 1 and setup.microbatches != 4:
        words.append(f"strategy.microbatches={setup.microbatches}")
    if setup.recompute != "none" and not fixed.recompute:
        words.append(f"strategy.activation_checkpointing={setup.recompute}")
    if setup.global_batch_size != size:
        words.append(f"data.global_batch_size={setup.global_batch_size}")
    if not fixed.micro:
        words.append(f"data.micro_batch_size={setup.micro}")
    words.append(f"trainer.devices={devices}")
    if num_nodes > 1:
        words.append(f"trainer.num_nodes={num_nodes} launch.rdzv_endpoint=HOST:PORT")
    return " ".join(words)


def with_adapters(
    cfg: DictConfig, device: Device, runs: Sequence[Candidate], *, fixed: Fixed
) -> list[Candidate]:
    """Return what trains adapters on the fewest devices instead, if no full training fits there
    without the host.
    """
    fewest = min((each.world_size for each in runs), default=0)
    there = [each for each in runs if each.world_size == fewest]
    if any(each.fits and not each.offloaded for each in there):
        return []
    base = next((each for each in there if each.choice.name in ("single", f"fsdp {fewest}")), None)
    if base is None or not base.setup.cost.linears or str(cfg.task._target_) != LANGUAGE_MODELING:
        return []
    found = []
    for words, quantize in (("task=lora", None), ("task=lora task.adapter.quantize=nf4", "nf4")):
        counts = {"devices": base.devices, "num_nodes": base.num_nodes}
        changed = layouts.applied(cfg, base.choice, **counts)
        typed = cfg.task.get("adapter") or {"_target_": LORA, "rank": 16, "alpha": 32.0}
        changed.task.adapter = {**typed, "quantize": quantize}
        choice = replace(base.choice, words=f"{words} {base.choice.words}")
        found.append(_best(changed, device.shared_by(base.devices), choice, **counts, fixed=fixed))
    return [each for each in found if each is not None and each.refused is None and each.fits]


def devices_needed(
    cfg: DictConfig, device: Device, *, fixed: Fixed, most: int = 4096
) -> int | None:
    """Return the fewest devices on which some layout fits, among powers of two.

    None if more than `most` are needed.
    """
    count = 1
    while count <= most:
        devices, num_nodes = _pair(device, count)
        if any(each.fits for each in rank(cfg, device, [(devices, num_nodes)], fixed=fixed)[0]):
            return devices * num_nodes
        count *= 2
    return None
