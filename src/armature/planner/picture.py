"""A plan as a picture, in the colors of the reader's theme."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from armature.pages.chart import label, linear_ticks, number, standalone
from armature.planner import memory
from armature.planner.ranking import Candidate
from armature.planner.text import GIB, shown

COLORS = {  # seen on white and on black
    "parameters": "#4c78a8",
    "gradients": "#f58518",
    "optimizer state": "#54a24b",
    "activations": "#e45756",
    "16-bit copies": "#9d755d",
    "gathered": "#b279a2",
    "temporary": "#eeca3b",
    "averaged weights": "#76b7b2",
    "buckets": "#ff9da6",
    "allowance": "#bab0ac",
}
ROW, BAR, NAMES, MEMORY, SPEED, SIZES, EDGE = 22, 14, 290, 330, 260, 56, 30  # pixels
TOP, KIND = 62, 106  # pixels: the first bar, a kind in the legend
MOST = 1.5  # times the device's memory that a bar shows


def svg(candidates: Sequence[Candidate], *, title: str, unit: str) -> str:
    """Return a picture: memory by kind of each layout beside the device's, and the range of
    throughput.
    """
    found = shown(candidates)
    simulated = any(each.simulated for each in found)
    capacity = max((each.capacity_bytes for each in found), default=1)
    fastest = max((each.units_per_second[1] for each in found), default=1)
    scale, rates = MEMORY / (MOST * capacity), NAMES + MEMORY + SIZES
    width, bottom = rates + SPEED + EDGE, TOP + ROW * len(found)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 44}" '
        'font-family="sans-serif" '
        'font-size="11">',
        label(8, 16, title, color="text", size=11),
        label(8, 52, "layout on GPUs, recomputation", size=11),
        label(
            NAMES,
            52,
            "memory of one GPU" + ("; *: as simulated, shares by formulas" if simulated else ""),
            size=11,
        ),
        label(rates, 52, f"{unit}/s, none to all communication hidden", size=11),
        *_axis(MOST * capacity / GIB, lambda value: NAMES + value * GIB * scale, bottom, "GiB"),
        *_axis(fastest, lambda value: rates + value / fastest * SPEED, bottom, f"{unit}/s"),
    ]
    peaks = [memory.peak(each.setup) for each in found]
    kinds = [
        kind
        for kind in COLORS
        if kind == "allowance" or any(kind in peak.bytes_by_kind for peak in peaks)
    ]
    for place, kind in enumerate(kinds):
        parts += [
            _rect(8 + KIND * place, 26, 10, 10, COLORS[kind]),
            label(21 + KIND * place, 35, kind, size=11),
        ]
    for row, each in enumerate(found):
        y, x = TOP + ROW * row, float(NAMES)
        star = "*" if each.simulated else ""
        name = f"{each.choice.name}{star} on {each.world_size}, {each.setup.recompute}"
        parts.append(label(8, y + 11, name, color="text", size=11))
        peak = peaks[row]
        stretched = each.peak_bytes / peak.total_bytes  # 1 unless simulated
        for kind, size in {**peak.bytes_by_kind, "allowance": peak.allowance_bytes}.items():
            wide = min(size * stretched * scale, NAMES + MEMORY - x)
            parts.append(_rect(x, y, wide, BAR, COLORS[kind]))
            x += wide
        low, high = (rate / fastest * SPEED for rate in each.units_per_second)
        parts.append(
            _rect(rates + low, y, max(2.0, high - low), BAR, "#4c78a8" if each.fits else "#bab0ac")
        )
        parts.append(label(x + 4, y + 11, f"{each.peak_bytes / GIB:.1f}", size=11))
    edge = NAMES + capacity * scale
    parts.append(
        f'<line x1="{edge:.1f}" y1="56" x2="{edge:.1f}" y2="{bottom}" stroke="var(--text)"/>'
    )
    parts.append(
        label(
            edge,
            bottom + 32,
            f"has {capacity / GIB:.1f} GiB",
            anchor="middle",
            color="text",
            size=11,
        )
    )
    return standalone("\n".join([*parts, "</svg>"]))


def _axis(most: float, place: Callable[[float], float], bottom: float, unit: str) -> list[str]:
    """Return lines at round numbers from 0, below them the numbers, and the unit."""
    parts = []
    for value in linear_ticks(0, most, count=5):
        x = place(value)
        parts.append(
            f'<line x1="{x:.1f}" y1="56" x2="{x:.1f}" y2="{bottom}" stroke="var(--grid)"/>'
        )
        parts.append(label(x, bottom + 15, number(value), anchor="middle", size=11))
    return [*parts, label(place(0), bottom + 32, unit, size=11)]


def _rect(x: float, y: float, width: float, height: float, color: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'
    )
