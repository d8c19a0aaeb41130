"""What a simulation of one rank found, and how it is shown."""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from armature.planning.seconds import hidden_and_exposed

GIB = 2**30


@dataclass(frozen=True)
class Volume:
    """One kind of collective along one axis, per optimizer step.

    Attributes:
        bytes: of the gathered or reduced tensors, as this rank holds them; `seconds`: if nothing
            else runs.
    """

    axis: str
    kind: str
    ranks: int
    calls: float
    bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """One rank of a run.

    Bytes are of its device's memory, FLOPs and seconds those of one optimizer step.

    Attributes:
        peak: most bytes that are allocated at once; `peak_by_kind` then, `peak_by_phase` in each
            phase.
        allowance: bytes that come on top: CUDA's context, buffers of NCCL and cuBLAS,
            fragmentation.
        capacity: bytes of the device.
        syncs: how often the host waits for the device, by line of code.
        compute_seconds: by phase; without waiting for others.
        bubble_share: share of the step in which a pipeline's schedule leaves the rank idle.
        model_flops: of the whole run's step by PaLM's convention; None if unknown.
        notes: what the simulation leaves out or takes otherwise.
        issued: all communication (`order.Issued`), and `validation_syncs`, of the batches of a
            validation, if the order was asked for.
    """

    rank: int
    world_size: int
    axes: Mapping[str, int]
    hardware: str
    parameters: int
    peak: float
    peak_by_kind: Mapping[str, float]
    peak_by_phase: Mapping[str, float]
    peak_at: str
    allowance: float
    capacity: float
    flops: Mapping[str, float]
    operators: float
    volumes: Sequence[Volume]
    syncs: Mapping[str, float]
    compute_seconds: Mapping[str, float]
    bubble_share: float
    samples_per_step: int
    tokens_per_sample: int | None
    model_flops: float | None
    peak_flops: float
    notes: Sequence[str] = ()
    issued: Sequence[Any] = ()
    validation_syncs: Mapping[str, float] = field(default_factory=dict)

    @property
    def needed(self) -> float:
        """Bytes of the device's memory, with the allowance."""
        return self.peak + self.allowance

    @property
    def fits(self) -> bool:
        return self.needed <= self.capacity

    @property
    def communication_seconds(self) -> float:
        return sum(volume.seconds for volume in self.volumes)

    @property
    def step_seconds(self) -> tuple[float, float]:
        """Seconds of an optimizer step: with all communication hidden behind computation, and with
        none.
        """
        compute = sum(self.compute_seconds.values())
        return hidden_and_exposed(
            compute, self.communication_seconds, bubble_share=self.bubble_share
        )

    @property
    def rate(self) -> tuple[float, float]:
        """Tokens (or samples) per second of all ranks: with no communication hidden, and with
        all.
        """
        count = self.samples_per_step * (self.tokens_per_sample or 1)
        hidden, exposed = self.step_seconds
        return count / exposed, count / hidden

    @property
    def mfu(self) -> tuple[float, float] | None:
        """Share of the devices' peak that the model's FLOPs reach: with no communication hidden,
        and with all.
        """
        if self.model_flops is None:
            return None
        hidden, exposed = self.step_seconds
        most = self.peak_flops * self.world_size
        return self.model_flops / exposed / most, self.model_flops / hidden / most

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


EXTRAPOLATED = (
    "peak", "peak_by_kind", "peak_by_phase", "flops", "operators", "compute_seconds", "model_flops",
    "parameters", "allowance", "syncs",
)  # fmt: skip


def extrapolated(small: Report, large: Report, *, depths: tuple[int, int], depth: int) -> Report:
    """Return the report of a model of `depth` layers, on the straight line through two shallower
    ones.
    """
    share = (depth - depths[0]) / (depths[1] - depths[0])

    def line(value: Callable[[Report], Any]) -> Any:
        return weighted((1 - share, value(small)), (share, value(large)))

    values = {name: line(operator.attrgetter(name)) for name in EXTRAPOLATED}
    volumes = line(
        lambda report: {
            (v.axis, v.kind, v.ranks): (v.calls, v.bytes, v.seconds) for v in report.volumes
        }
    )
    values["volumes"] = [Volume(*key, *numbers) for key, numbers in volumes.items()]
    values["parameters"] = round(values["parameters"])
    note = f"Extrapolated linearly from {depths[0]} and {depths[1]} layers to {depth}."
    if depths[0] < 3:
        note += (
            " In fewer than 3, no block lies between two others, so memory may be far off: "
            "type --depths 3,5."
        )
    return dataclasses.replace(large, **values, notes=(*large.notes, note))


def weighted(*parts: tuple[float, Any]) -> Any:
    """Return the weighted sum of (weight, value), where a value is a number, or a dict or tuple of
    values; what one lacks is 0 there.
    """
    values = [value for _, value in parts if value is not None]
    if not values:
        return None
    if isinstance(values[0], Mapping):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: weighted(*((w, (v or {}).get(key)) for w, v in parts)) for key in keys}
    if isinstance(values[0], tuple):
        places = range(len(values[0]))
        return tuple(weighted(*((w, v and v[i]) for w, v in parts)) for i in places)
    return sum(weight * value for weight, value in parts if value is not None)


# ---------------------------------------------------------------- text
def text(reports: Sequence[Report]) -> str:
    """Return the reports of some ranks of one run as a page of text."""
    first = reports[0]
    layout = (
        " × ".join(f"{axis} {size}" for axis, size in first.axes.items() if size > 1) or "one rank"
    )
    devices = f"{first.world_size} × {first.hardware}"
    lines = [f"{first.parameters:,} parameters on {devices}: {layout}", ""]
    for report in reports:
        lines += [*_memory(report), ""]
    slowest = max(reports, key=lambda report: report.step_seconds[1])
    lines += [*_speed(slowest), "", *_communication(slowest), "", *_syncs(reports)]
    notes = dict.fromkeys(note for report in reports for note in report.notes)
    return "\n".join([*lines, *(["", *(f"Note: {note}" for note in notes)] if notes else [])])


def _memory(report: Report) -> list[str]:
    verdict = "fits" if report.fits else "does NOT fit"
    head = (
        f"rank {report.rank}: {report.needed / GIB:.1f} GiB of {report.capacity / GIB:.1f} GiB, "
        f"{verdict} "
        f"(peak {report.peak / GIB:.2f} GiB in {report.peak_at})"
    )
    kinds = {
        **dict(sorted(report.peak_by_kind.items(), key=lambda item: -item[1])),
        "allowance": report.allowance,
    }
    by_kind = [
        f"  {kind:<20}{size / GIB:9.2f} GiB" for kind, size in kinds.items() if size > 0.005 * GIB
    ]
    if not by_kind:
        by_kind = [
            f"  {kind:<20}{size / 2**20:9.3f} MiB" for kind, size in kinds.items() if size > 0
        ]
    phases = ", ".join(f"{phase} {size / GIB:.2f}" for phase, size in report.peak_by_phase.items())
    return [head, *by_kind, f"  peak by phase, GiB: {phases}"]


def _speed(report: Report) -> list[str]:
    hidden, exposed = report.step_seconds
    unit = "tokens" if report.tokens_per_sample else "samples"
    (low, high), compute = report.rate, sum(report.compute_seconds.values())
    phases = ", ".join(
        f"{phase} {seconds:.3f}" for phase, seconds in report.compute_seconds.items() if seconds
    )
    lines = [
        f"step of {report.samples_per_step:,} samples: {hidden:.3f} to {exposed:.3f} s "
        "(all or no communication hidden)",
        f"  computation {compute:.3f} s ({phases}), communication "
        f"{report.communication_seconds:.3f} s"
        + (f", idle in the pipeline {report.bubble_share:.0%}" if report.bubble_share else ""),
        f"  {sum(report.flops.values()):.4g} FLOPs of rank {report.rank}, {report.operators:,.0f} "
        "operators",
        f"  {low:,.0f} to {high:,.0f} {unit}/s, "
        f"{low / report.world_size:,.0f} to {high / report.world_size:,.0f} per GPU",
    ]
    return lines + (
        [f"  MFU {report.mfu[0]:.1%} to {report.mfu[1]:.1%}"] if report.mfu is not None else []
    )


def _communication(report: Report) -> list[str]:
    if not report.volumes:
        return ["no communication"]
    lines = [
        f"communication per step of rank {report.rank}, bytes of the gathered or reduced tensors:"
    ]
    for v in sorted(report.volumes, key=lambda volume: -volume.bytes):
        size = f"{v.bytes / GIB:,.3f} GiB" if v.bytes >= 2**20 else f"{v.bytes:,.0f} B"
        lines.append(
            f"  {v.axis:<18}{v.kind:<15}{v.ranks:5d} ranks {v.calls:8,.0f} calls {size:>16} "
            f"{v.seconds:8.3f} s"
        )
    return lines


def _syncs(reports: Sequence[Report]) -> list[str]:
    found: dict[str, float] = {}
    for report in reports:
        for line, count in report.syncs.items():
            found[line] = max(found.get(line, 0), count)
    if not found:
        return ["the host never waits for the device in a step"]
    lines = [
        f"  {count:6,.0f} × {line}"
        for line, count in sorted(found.items(), key=lambda item: -item[1])
    ]
    return ["the host waits for the device, per step:", *lines]
