"""Every layout for a number of devices, with the best micro-batch and recomputation of each,
ranked by closed formulas; the first few are then simulated.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from omegaconf import DictConfig

from armature.data import batching
from armature.errors import ConfigError, error_line
from armature.layout import Layout
from armature.planning import layouts, memory, seconds
from armature.planning.auto import HEADROOM, WIDE_BLOCK
from armature.planning.devices import Device
from armature.planning.layouts import Choice
from armature.planning.setup import Setup, setup_of
from armature.validation import checks

log = logging.getLogger(__name__)
# samples per rank that are tried
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
PIECES = (4, 8, 16, 32)  # of a pipeline's micro-batch
ENOUGH_POSITIONS = 16_384  # of a micro-batch, with which a GPU's kernels are busy
# relative difference of throughput below which the simpler layout comes first: predictions are no
# better
NEAR = 0.1
COUNTS = (1, 2, 4, 8, 16, 32, 64)  # devices that are tried if none are named
MOST_DEVICES = 4096  # that are tried for a model that does not fit
SIMULATED = 3  # layouts
# layers of the two models that are simulated for one with many; the rest lies on a straight line
DEPTHS = (3, 5)


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

    @property
    def tier(self) -> int:
        """0: fits with room, 1: fits, 2: does not fit."""
        return int(self.margin < HEADROOM) if self.fits else 2


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What the user has typed, and a plan keeps: None means that the plan chooses."""

    micro: int | None = None
    recompute: str | None = None


def counts(device: Device, *, devices: int | None, num_nodes: int | None) -> list[tuple[int, int]]:
    """Return (devices per machine, machines) to try.

    ConfigError: more devices than a machine has.
    """
    if devices is not None and (problem := device.too_many(devices)):
        raise ConfigError(problem)
    if devices is not None or num_nodes is not None:
        return [(devices or device.devices_per_machine, num_nodes or 1)]
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
    plan = Layout.of(cfg).plan
    count = cfg.model.get(plan.expert_count) if plan is not None and plan.expert_count else None
    found: list[Candidate] = []
    for devices, num_nodes in pairs:
        shared, experts = device.shared_by(devices), count if isinstance(count, int) else 1
        for choice in layouts.choices(devices=devices, num_nodes=num_nodes, experts=experts):
            if device.accelerator == "cpu" and choice.effort > 6:
                continue  # on a CPU there is nothing to offload from, and DeepSpeed has no kernels
            changed = layouts.applied(cfg, choice, devices=devices, num_nodes=num_nodes)
            if (best := _best(changed, shared, choice, fixed=fixed)) is not None:
                found.append(best)
    return sort(each for each in found if each.refused is None), [
        each for each in found if each.refused is not None
    ]


def sort(found: Iterable[Candidate]) -> list[Candidate]:
    """Return candidates from the best to the worst: what fits with room, what fits, what does not;
    what keeps the global batch, which decides the result; then by throughput, and what is near by
    simplicity.
    """
    found = list(found)
    fastest: dict[bool, float] = {}  # of those that keep the batch, and of others
    for each in found:
        if each.fits:
            fastest[each.other_batch] = max(each.rate, fastest.get(each.other_batch, 0.0))

    def order(each: Candidate) -> tuple[float, ...]:
        if not each.fits:
            return each.tier, each.peak_bytes, each.effort
        slower = fastest[each.other_batch] / each.rate
        steps = math.floor(math.log(slower) / math.log(1 + NEAR))
        return each.tier, each.other_batch, steps, each.effort, -each.rate

    return sorted(found, key=order)


def _best(cfg: DictConfig, device: Device, choice: Choice, *, fixed: Fixed) -> Candidate | None:
    """Return a layout's fastest variant that fits, or the one that needs least.

    Changes the batch sizes of `cfg`.

    None: it has no formula, as adapters have none under DeepSpeed, or fewer blocks than pipeline
    stages.
    """
    layout = Layout.of(cfg)
    size = batching.configured_batch_size(cfg.data) or layout.data_ranks
    pipe = layout.axes["pipe"]
    pieces = [number for number in PIECES if number >= pipe] if pipe > 1 else [1]
    # the global batch, or the smallest multiple above it that divides among the ranks
    unit = layout.data_ranks * (fixed.micro or pieces[0])
    cfg.data.global_batch_size = batch = -(-size // unit) * unit
    cfg.data.micro_batch_size = fixed.micro or pieces[0]
    setup = setup_of(cfg, layout)
    if setup is None or setup.cost.blocks < pipe:
        return None
    share = batch // layout.data_ranks
    variants = [
        replace(
            setup, micro=micro, accumulate=share // micro, recompute=recompute, microbatches=number
        )
        for micro in ([fixed.micro] if fixed.micro else MICRO_BATCHES)
        for recompute in ([fixed.recompute] if fixed.recompute else layouts.RECOMPUTE)
        for number in pieces
        if share % micro == 0 and micro % number == 0
    ] or [setup]
    refusals = checks.layout_problems(cfg)
    candidates = [
        Candidate(
            choice=choice,
            devices=cfg.trainer.devices,
            num_nodes=cfg.trainer.num_nodes,
            setup=each,
            peak_bytes=memory.peak(each).total_bytes,
            capacity_bytes=device.memory_bytes,
            units_per_second=seconds.step_seconds(each, device).units_per_second,
            words=_words(cfg, each, choice, size=size, fixed=fixed),
            refused=refusals[0] if refusals else None,
        )
        for each in variants
    ]
    return min(candidates, key=_variant_order)


def _variant_order(each: Candidate) -> tuple[float, ...]:
    """Sort key of one layout's variants: with room, then by throughput, then with kernels that are
    large enough.
    """
    if not each.fits:
        return each.tier, each.peak_bytes
    positions = min(each.setup.micro * each.setup.cost.positions, ENOUGH_POSITIONS)
    return each.tier, -round(math.log(each.rate) / math.log(1.02)), -positions, each.peak_bytes


def _words(cfg: DictConfig, setup: Setup, choice: Choice, *, size: int, fixed: Fixed) -> str:
    """Return what to type for a layout's variant; `size`: the configured global batch."""
    words = [choice.words]
    if setup.axes["pipe"] > 1 and setup.microbatches != 4:
        words.append(f"strategy.microbatches={setup.microbatches}")
    if setup.recompute != "none" and not fixed.recompute:
        words.append(f"strategy.activation_checkpointing={setup.recompute}")
    if setup.global_batch_size != size:
        words.append(f"data.global_batch_size={setup.global_batch_size}")
    if not fixed.micro:
        words.append(f"data.micro_batch_size={setup.micro}")
    words.append(f"trainer.devices={cfg.trainer.devices}")
    if cfg.trainer.num_nodes > 1:
        words.append(f"trainer.num_nodes={cfg.trainer.num_nodes} launch.rdzv_endpoint=HOST:PORT")
    return " ".join(words)


def devices_needed(cfg: DictConfig, device: Device, *, fixed: Fixed) -> int | None:
    """Return the fewest devices on which some layout fits, among powers of two; None if more than
    MOST_DEVICES are needed.
    """
    for exponent in range(MOST_DEVICES.bit_length()):
        devices, num_nodes = _pair(device, 2**exponent)
        if any(each.fits for each in rank(cfg, device, [(devices, num_nodes)], fixed=fixed)[0]):
            return devices * num_nodes
    return None


def simulated(cfg: DictConfig, device: Device, runs: Sequence[Candidate]) -> list[Candidate]:
    """Return the ranking with the first layouts' memory and throughput as simulated."""
    chosen = [each for each in runs if each.setup.kind != "deepspeed"][:SIMULATED]
    if device.accelerator == "cpu" or not chosen:
        return list(runs)
    from armature.planning import simulation

    requests = []
    for each in chosen:
        changed = layouts.applied(cfg, each.choice, devices=each.devices, num_nodes=each.num_nodes)
        changed.data.micro_batch_size = each.setup.micro
        changed.data.global_batch_size = each.setup.global_batch_size
        changed.strategy.activation_checkpointing = each.setup.recompute
        pipeline = each.setup.axes["pipe"] > 1
        if pipeline:
            changed.strategy.microbatches = each.setup.microbatches
        deep = each.setup.cost.blocks > 2 * DEPTHS[1] and not pipeline
        rank, depths = each.world_size - 1 if pipeline else 0, DEPTHS if deep else None
        requests.append(simulation.Request(cfg=changed, rank=rank, device=device, depths=depths))
    found = dict(zip(map(id, chosen), simulation.simulate_all(requests), strict=True))
    ranked = []
    for each in runs:
        result = found.get(id(each))
        if isinstance(result, Exception):
            log.warning("%s was not simulated: %s", each.choice.name, error_line(result))
        elif result is not None:
            each = replace(
                each, peak_bytes=result.needed, units_per_second=result.rate, simulated=True
            )
        ranked.append(each)
    return sort(ranked)
