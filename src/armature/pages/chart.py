"""Line charts as SVG, without a plotting library.

Colors are CSS variables, which a page sets for all its charts, for a light and a dark theme by the
reader's preference. `standalone` fills in the light ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

POINTS = 500  # of a line, at most twice as many: a chart has fewer pixels
SERIES = 8  # colors, used in turn
THEMES = {
    "light": {
        "ground": "#ffffff",
        "text": "#1f2328",
        "quiet": "#656d76",
        "grid": "#e3e6ea",
        "mark": "#9a6700",
        "c0": "#0969da",
        "c1": "#d1570a",
        "c2": "#1a7f37",
        "c3": "#8250df",
        "c4": "#bf3989",
        "c5": "#8a6a00",
        "c6": "#0f7f86",
        "c7": "#cf222e",
    },
    "dark": {
        "ground": "#0d1117",
        "text": "#e6edf3",
        "quiet": "#9198a1",
        "grid": "#2b3138",
        "mark": "#d29922",
        "c0": "#58a6ff",
        "c1": "#f0883e",
        "c2": "#3fb950",
        "c3": "#bc8cff",
        "c4": "#f778ba",
        "c5": "#d4b106",
        "c6": "#39c5cf",
        "c7": "#ff7b72",
    },
}
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 34, 38  # pixels around the plot
LEGEND_LINE, LETTER = 18, 6.6  # pixels


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve. A value that is not finite interrupts it."""

    xs: Sequence[float]
    ys: Sequence[float]
    label: str = ""  # "": not in the legend
    color: int = 0
    width: float = 1.8
    opacity: float = 1.0
    dots: bool = False  # few values: show where they are
    title: str = ""  # of its dots, shown under the mouse


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over one horizontal axis. `marks` are dashed vertical lines with a text.

    `x_ticks` replace round numbers where they do not overlap; `x_margin` is a share of the axis, at
    both ends.
    """

    title: str
    lines: Sequence[Line]
    x_label: str = "step"
    log: bool = False
    marks: Sequence[tuple[float, str]] = ()
    note: str = ""
    width: int = 560
    height: int = 280
    from_zero: bool = False
    x_ticks: Sequence[tuple[float, str]] = ()
    x_margin: float = 0.0


def smooth(ys: Sequence[float], window: int) -> list[float]:
    """Return the mean over a centered window, which shrinks towards both ends and leaves out what
    is not finite.

    An even window counts one more. Sums are exact, as whole multiples of a power of two: in sums of
    floats, a value of
    1e20 would leave zeros behind it.
    """
    ratios = [float(y).as_integer_ratio() if math.isfinite(y) else None for y in ys]
    unit = max((ratio[1] for ratio in ratios if ratio is not None), default=1)
    half, sums, counts = max(0, window // 2), [0], [0]
    for ratio in ratios:
        sums.append(sums[-1] + (ratio[0] * (unit // ratio[1]) if ratio is not None else 0))
        counts.append(counts[-1] + (ratio is not None))
    means = []
    for i in range(len(ys)):
        reach = min(half, i, len(ys) - 1 - i)
        low, high = i - reach, i + reach + 1
        count = counts[high] - counts[low]
        means.append((sums[high] - sums[low]) / (count * unit) if count else math.nan)
    return means


def thin(xs: Sequence[float], ys: Sequence[float], points: int) -> tuple[list[float], list[float]]:
    """Return at most about two points per bucket, the lowest and the highest: peaks stay."""
    if len(xs) <= 2 * points:
        return [*xs], [*ys]
    kept: list[int] = []
    for bucket in range(points):
        indices = range(bucket * len(xs) // points, (bucket + 1) * len(xs) // points)
        finite = [i for i in indices if math.isfinite(ys[i])]
        if finite:
            kept += sorted({min(finite, key=ys.__getitem__), max(finite, key=ys.__getitem__)})
        else:
            kept += indices[:1]
    kept = sorted({0, *kept, len(xs) - 1})
    return [xs[i] for i in kept], [ys[i] for i in kept]


def render(chart: Chart) -> str:
    """Return an <svg> element whose colors are CSS variables."""
    legend, legend_height = _legend(chart)
    width, height = chart.width, chart.height + legend_height
    plot = _Plot(chart)
    title = escape(chart.title, quote=True)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{title}" '
        f'font-family="system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif" '
        'font-size="12">',
        f'<text x="{LEFT - 46}" y="20" font-size="14" font-weight="600" '
        f'fill="var(--text)">{title}</text>',
    ]
    if chart.note:
        parts.append(label(width - RIGHT, 20, chart.note, anchor="end"))
    parts += plot.axes()
    parts += plot.marks()
    parts += [element for line in chart.lines for element in plot.line(line)]
    if not plot.has_values:
        parts.append(label(plot.middle, chart.height / 2, "no values yet", anchor="middle"))
    return "".join([*parts, *legend, "</svg>"])


def standalone(svg: str) -> str:
    """Return an SVG file in the colors of the light theme."""
    colors = THEMES["light"]
    svg = re.sub(r"var\(--(\w+)\)", lambda found: colors[found[1]], svg)
    end = svg.index(">") + 1
    return f'{svg[:end]}<rect width="100%" height="100%" fill="{colors["ground"]}"/>{svg[end:]}\n'


def stylesheet() -> str:
    """Return the CSS variables of both themes, for a page."""
    light = f":root{{color-scheme:light dark;{_variables('light')}}}"
    return f"{light}\n@media(prefers-color-scheme:dark){{:root{{{_variables('dark')}}}}}\n"


def _variables(theme: str) -> str:
    return ";".join(f"--{name}:{color}" for name, color in THEMES[theme].items())


def label(
    x: float, y: float, text: str, *, anchor: str = "start", color: str = "quiet", size: int = 12
) -> str:
    """Return a text whose color is one of THEMES."""
    sized = f' font-size="{size}"' if size != 12 else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" '
        f'fill="var(--{color})"{sized}>{escape(text)}</text>'
    )


def _legend(chart: Chart) -> tuple[list[str], int]:
    """Return the legend's elements below the plot, and the pixels that they take.

    A single curve needs none.
    """
    named = [line for line in chart.lines if line.label]
    if len(named) < 2:
        return [], 0
    parts, x, row = [], float(LEFT - 46), 0
    for line in named:
        name = line.label if len(line.label) <= 60 else line.label[:59] + "…"
        need = 26 + LETTER * len(name)
        if x > LEFT and x + need > chart.width - RIGHT:
            x, row = float(LEFT - 46), row + 1
        y = chart.height + 8 + row * LEGEND_LINE
        thick = min(line.width, 6.0)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x + 16:.1f}" y1="{y}" y2="{y}" '
            f'stroke="var(--c{line.color % SERIES})" '
            f'stroke-width="{max(thick, 2.5):.1f}"/>'
        )
        parts.append(label(x + 21, y + 4, name, color="text"))
        x += need + 10
    return parts, 10 + LEGEND_LINE * (row + 1)


class _Plot:
    """Where values lie in the drawing."""

    def __init__(self, chart: Chart) -> None:
        self.chart = chart
        xs = [x for line in chart.lines for x in line.xs if math.isfinite(x)]
        ys = [
            y
            for line in chart.lines
            for y in line.ys
            if math.isfinite(y) and (y > 0 or not chart.log)
        ]
        self.has_values = bool(xs and ys)
        self.x_low, self.x_high = (min(xs), max(xs)) if xs else (0.0, 1.0)
        if self.x_high <= self.x_low:
            self.x_high = self.x_low + 1.0
        margin = chart.x_margin * (self.x_high - self.x_low)
        self.x_low, self.x_high = self.x_low - margin, self.x_high + margin
        self.y_low, self.y_high = self._vertical(ys)
        self.middle = (LEFT + chart.width - RIGHT) / 2

    def _vertical(self, ys: list[float]) -> tuple[float, float]:
        if not ys:
            return (0.1, 1.0) if self.chart.log else (0.0, 1.0)
        low, high = min(ys), max(ys)
        if self.chart.log:
            low, high = math.log10(low), math.log10(high)
            pad = max(0.04 * (high - low), 0.02)
            return 10 ** max(low - pad, -300.0), 10 ** min(high + pad, 300.0)
        if self.chart.from_zero:
            low = min(low, 0.0)
        pad = 0.05 * (high - low) or abs(high) * 0.1 or 0.5
        low_pad = 0.0 if self.chart.from_zero and low == 0.0 else pad
        return max(low - low_pad, -1e300), min(high + pad, 1e300)

    def x(self, value: float) -> float:
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return LEFT + share * (self.chart.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_low, self.y_high
        if self.chart.log:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        return (
            self.chart.height
            - BOTTOM
            - (value - low) / (high - low) * (self.chart.height - TOP - BOTTOM)
        )

    def axes(self) -> list[str]:
        chart, bottom = self.chart, self.chart.height - BOTTOM
        ticks = (
            log_ticks(self.y_low, self.y_high)
            if chart.log
            else linear_ticks(self.y_low, self.y_high)
        )
        parts = []
        for value in ticks:
            y = self.y(value)
            parts.append(
                f'<line x1="{LEFT}" x2="{chart.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
                'stroke="var(--grid)"/>'
            )
            parts.append(label(LEFT - 8, y + 4, number(value), anchor="end"))
        round_numbers = linear_ticks(self.x_low, self.x_high, count=max(3, chart.width // 110))
        free = 0.0
        for value, text in chart.x_ticks or [(value, number(value)) for value in round_numbers]:
            half = LETTER * len(text) / 2
            if self.x(value) - half >= free:
                parts.append(label(self.x(value), bottom + 17, text, anchor="middle"))
                free = self.x(value) + half + 6
        parts.append(label(chart.width - RIGHT, bottom + 32, chart.x_label, anchor="end", size=11))
        if chart.log:
            parts.append(label(LEFT - 46, bottom + 32, "log scale", size=11))
        return parts

    def marks(self) -> list[str]:
        parts, top, bottom, last = [], TOP, self.chart.height - BOTTOM, -math.inf
        for at, text in sorted(self.chart.marks):
            if not self.x_low <= at <= self.x_high:
                continue
            x = self.x(at)
            title = f"<title>{escape(text)}</title>"
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="var(--mark)" '
                'stroke-dasharray="4 3">'
                f"{title}</line>"
            )
            if x - last > LETTER * len(text) + 8:
                right = x + LETTER * len(text) + 6 < self.chart.width
                parts.append(
                    label(
                        x + (4 if right else -4),
                        top + 11,
                        text,
                        anchor="start" if right else "end",
                        color="mark",
                        size=11,
                    )
                )
                last = x
        return parts

    def line(self, line: Line) -> Iterable[str]:
        xs, ys = thin(line.xs, line.ys, POINTS)
        pieces: list[list[str]] = [[]]
        for x, y in zip(xs, ys, strict=True):
            if math.isfinite(x) and math.isfinite(y) and (y > 0 or not self.chart.log):
                pieces[-1].append(f"{self.x(x):.1f},{self.y(y):.1f}")
            elif pieces[-1]:
                pieces.append([])
        color = f"var(--c{line.color % SERIES})"
        for piece in pieces:
            if len(piece) > 1:
                yield (
                    f'<polyline points="{" ".join(piece)}" fill="none" stroke="{color}" '
                    f'stroke-width="{line.width}" '
                    f'stroke-opacity="{line.opacity}" stroke-linejoin="round" '
                    'stroke-linecap="round"/>'
                )
            for point in piece if line.dots or len(piece) == 1 else ():
                x, y = point.split(",")
                radius = max(2.6, line.width)
                title = f"><title>{escape(line.title)}</title></circle>" if line.title else "/>"
                yield f'<circle cx="{x}" cy="{y}" r="{radius:.1f}" fill="{color}"{title}'


def linear_ticks(low: float, high: float, *, count: int = 6) -> list[float]:
    """Return round numbers within the range, about `count` of them."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    size = next((step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough), 10 * power)
    first = math.ceil(low / size - 1e-9)
    return [i * size for i in range(first, math.floor(high / size + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten within the range, and more round numbers if these are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, (last - first) // 6)
    for digits in ((1,), (1, 3), (1, 2, 5), range(1, 10)):
        ticks = [
            d * 10.0**p
            for p in range(first, last + 1, every)
            for d in digits
            if low <= d * 10.0**p <= high
        ]
        if len(ticks) >= 3:
            return ticks
    return linear_ticks(low, high)


def number(value: float) -> str:
    """Return a short number for an axis: 0.25, 1.5k, 2M, 3e-4."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if 1e15 > size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}" if 1e-3 <= size < 1e5 else f"{value:.2g}"
