"""strategy=auto: the simplest strategy that fits, by closed formulas; and the warning before a
launch that will not.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from omegaconf import DictConfig, OmegaConf

from armature import hardware
from armature.errors import ConfigError
from armature.layout import STRATEGIES, Layout
from armature.planning import memory
from armature.planning.setup import Setup, knows_optimizer, setup_of
from armature.validation import signatures

GIB = 2**30
AUTO = "armature.strategies.auto.auto"
TENSOR = 8  # ranks of one machine that may share each matrix
# parameters from which on an eighth of a block's matrices still fills a GPU (width 8,192)
WIDE_BLOCK = 500_000_000
LARGE_WORLD = 64  # ranks from which on gathering weights within a machine pays
# share of the device left free: a test holds the formulas within this of the simulator
HEADROOM = 0.1
PLAN_COMMAND = (
    "python scripts/plan.py with this command's overrides and hardware=this lists what fits."
)
Problems = Callable[[DictConfig], list[str]]


@dataclass(frozen=True, kw_only=True)
class Try:
    """One strategy that auto may choose: its configuration and its predicted peak."""

    name: str
    cfg: DictConfig
    sharded: bool
    recompute: bool
    peak: memory.Peak

    @property
    def words(self) -> str:
        return f"{self.name}{' with activation_checkpointing=every' if self.recompute else ''}"


def decide(
    cfg: DictConfig, *, memory_bytes: int | None, problems: Problems
) -> tuple[DictConfig, str | None]:
    """Return the configuration with auto's choice, and a line that says what was chosen and why.

    The line is None, and the configuration as it was, if the strategy is another. `single` and
    `ddp` stay `auto`, so that a run may go on with more or fewer processes.

    Args:
        memory_bytes: of one device; None: unknown.
        problems: returns what is wrong with a layout.

    Raises ConfigError if the optimizer's step does not fit under any strategy, whatever the
    micro-batch.
    """
    if OmegaConf.select(cfg, "strategy._target_") != AUTO:
        return cfg, None
    try:
        layout = Layout.of(cfg)
        setup = setup_of(cfg, layout)
    except ConfigError:  # the batch does not divide: reported by its own check
        return cfg, None
    why = _unknown(cfg, setup, memory_bytes)
    if setup is None or memory_bytes is None or why:
        return cfg, f"strategy=auto: {layout.kind}, since {why}."
    room = _room(cfg, memory_bytes)
    tried: list[Try] = []
    blocked: list[str] = []
    for each in _tries(cfg, setup, room=room):
        if each.sharded and (found := problems(each.cfg)):
            blocked += found
        elif each.peak.total_bytes <= room:
            return each.cfg, _line(each, tried, memory_bytes)
        else:
            tried.append(each)
    shards = not blocked or any(each.sharded for each in tried)  # some axis can do it
    # a user's task may freeze weights
    if shards and str(cfg.task._target_).startswith("armature."):
        _refuse(cfg, setup, tried, memory_bytes=memory_bytes)
    best = min(tried, key=lambda each: each.peak.total_bytes)
    why = "" if shards else f" Sharding is not possible: {blocked[0]}"
    return best.cfg, (
        f"strategy=auto: {best.words}, which needs least of all: "
        f"{_needs(best.peak, memory_bytes)}.{why} {PLAN_COMMAND}"
    )


def _room(cfg: DictConfig, memory_bytes: int) -> float:
    """Return the bytes that a predicted peak may take; the formulas are of uncompiled blocks, which
    keep more.
    """
    compiled = OmegaConf.select(cfg, "strategy.compile", default="none") != "none"
    return memory_bytes * (1 if compiled else 1 - HEADROOM)


def micro_batch_size(
    cfg: DictConfig, layout: Layout, *, memory_bytes: int | None
) -> tuple[int, str] | None:
    """Return what `data.micro_batch_size=auto` begins with, and a line that says why; None: a
    rank's whole share.

    It is the largest that fits by the formulas: a search downward from the whole share would take a
    start per size.
    """
    try:
        setup = setup_of(cfg, layout) if cfg.data.micro_batch_size == "auto" else None
    except ConfigError:  # the batch does not divide: reported by its own check
        return None
    if setup is None or memory_bytes is None or _unknown(cfg, setup, memory_bytes):
        return None
    fitting = _fitting(setup, room=_room(cfg, memory_bytes))
    if fitting.micro == setup.micro:
        return None
    return fitting.micro, (
        f"data.micro_batch_size=auto: {fitting.micro} of the {setup.micro} samples that a rank has "
        f"per step, which needs {_needs(memory.peak(fitting), memory_bytes)}."
    )


def _fitting(setup: Setup, *, room: float) -> Setup:
    """Return the run with the largest micro-batch that fits, or with the smallest there is."""
    share = setup.micro * setup.accumulate
    unit = setup.microbatches if setup.axes["pipe"] > 1 else 1  # a pipeline divides a micro-batch
    fitting = setup
    for micro in (size for size in range(share, 0, -1) if share % size == 0 and size % unit == 0):
        fitting = replace(setup, micro=micro, accumulate=share // micro)
        if memory.peak(fitting).total_bytes <= room:
            break
    return fitting


def _unknown(cfg: DictConfig, setup: Setup | None, memory_bytes: int | None) -> str | None:
    """Return why memory cannot be predicted, or None."""
    if setup is None:
        return "the model or its data have no formula for their memory"
    if not knows_optimizer(cfg):
        return "the memory of this optimizer is unknown"
    return None if memory_bytes is not None else "the memory of the device is unknown"


def _tries(cfg: DictConfig, setup: Setup, *, room: float) -> Iterator[Try]:
    """Yield the strategies from the simplest on, each first as typed and then, all of them, with
    recomputation.

    With data.micro_batch_size=auto, each with the largest micro-batch that fits: it costs less than
    another strategy.
    """
    world, devices = setup.world_size, cfg.trainer.devices
    plain: list[tuple[str, dict[str, int | str]]] = [("single" if world == 1 else "ddp", {})]
    # else ddp's own
    if world > 1 and set(cfg.strategy) <= {"_target_", *signatures.defaults_of(STRATEGIES["mesh"])}:
        tensor = math.gcd(min(TENSOR, devices), setup.cost.key_heads or TENSOR)
        wide = setup.cost.block - setup.cost.experts >= WIDE_BLOCK and 1 < devices < world
        if wide and tensor > 1:
            plain.append(("fsdp_tensor", {"shard": "auto", "tensor": tensor}))
        if world >= LARGE_WORLD and devices > 1:
            plain.append(("hsdp", {"replicate": "auto", "shard": devices}))
        plain.append(("fsdp", {"shard": "auto"}))
    for recompute in (False, True) if setup.recompute == "none" else (False,):
        for name, axes in plain:
            changed = _with(cfg, axes, recompute=recompute)
            try:
                found = setup_of(changed, Layout.of(changed))
            except ValueError:  # axes or batch do not divide; ConfigError is one
                continue
            assert found is not None
            if cfg.data.micro_batch_size == "auto":
                found = _fitting(found, room=room)
            yield Try(
                name=name,
                cfg=changed,
                sharded=bool(axes),
                recompute=recompute,
                peak=memory.peak(found),
            )


def _with(cfg: DictConfig, axes: Mapping[str, int | str], *, recompute: bool) -> DictConfig:
    strategy = {"_target_": STRATEGIES["mesh"], **axes} if axes else {}
    if recompute:
        strategy["activation_checkpointing"] = "every"
    changed = cfg.copy()
    OmegaConf.set_struct(changed, False)
    changed.strategy.update(strategy)
    OmegaConf.set_struct(changed, True)
    return changed


def _line(chosen: Try, tried: Sequence[Try], memory_bytes: int) -> str:
    line = f"strategy=auto: {chosen.words}, which needs {_needs(chosen.peak, memory_bytes)}"
    if not tried:
        return f"{line}."
    before = next((each for each in tried if each.name == chosen.name), tried[0])
    without = " without" if before.name == chosen.name else ""
    return f"{line}; {before.name}{without} would need {_size(before.peak.total_bytes)}."


def _refuse(cfg: DictConfig, setup: Setup, tried: Sequence[Try], *, memory_bytes: int) -> None:
    """Raise ConfigError if the optimizer's step alone takes more than a device has under all that
    was tried.
    """
    least = min(each.peak.least_bytes for each in tried)
    if least <= memory_bytes:
        return
    offload = "strategy=fsdp strategy.cpu_offload=true"
    if setup.world_size == 1:
        # fsdp shards nothing there, and offloads nothing; DeepSpeed has no Muon
        muon = setup.matrix_state != setup.other_state
        offload = f"{'optimizer=adamw ' if muon else ''}strategy=deepspeed_zero3_offload"
    on_host = cfg.trainer.accelerator == "cpu"
    remedy = "" if on_host else f"{offload} keeps them in the host's memory. "
    raise ConfigError(
        f"strategy=auto: weights, gradients and optimizer state of {setup.cost.parameters:,} "
        f"parameters take at least {_size(least)} per device in the optimizer's step, and one has "
        f"{_size(memory_bytes)}. {remedy}{PLAN_COMMAND}"
    )


def warning(
    cfg: DictConfig, layout: Layout, *, memory_bytes: int | None
) -> tuple[str, memory.Peak] | None:
    """Return a line if a run's predicted peak exceeds the device, with the peak.

    None if it fits or is unknown.
    """
    try:
        setup = setup_of(cfg, layout)
    except ConfigError:
        return None
    if setup is None or memory_bytes is None or _unknown(cfg, setup, memory_bytes):
        return None
    peak = memory.peak(setup)
    # the formulas are of uncompiled blocks, which keep more
    compiled = layout.options.get("compile", "none") != "none"
    if (peak.least_bytes if compiled else peak.total_bytes) <= memory_bytes:
        return None
    kinds = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in peak.bytes_by_kind.items())
    line = (
        f"Memory will probably run out: a rank needs {_size(peak.total_bytes)}, and its device has "
        f"{_size(memory_bytes)} (predicted, in GiB: {kinds}, allowance "
        f"{peak.allowance_bytes / GIB:.1f})."
    )
    return line, peak


def device_memory_bytes(cfg: DictConfig) -> int | None:
    """Return the memory of one device of this machine, None if unknown.

    CPU processes share the machine's.
    """
    if cfg.trainer.accelerator == "gpu":
        return hardware.gpu_memory_bytes()
    if cfg.trainer.accelerator == "cpu":
        return hardware.ram_bytes() // cfg.trainer.devices
    return None


def _needs(peak: memory.Peak, memory_bytes: int) -> str:
    return f"{_size(peak.total_bytes)} of {_size(memory_bytes)} per device (predicted)"


def _size(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"
