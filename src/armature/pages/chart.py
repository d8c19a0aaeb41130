"""Line charts as SVG, without a plotting library.

Colors are variables of page.css, for a light and a dark theme by the reader's preference.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean

WIDTH, HEIGHT = 560, 280  # pixels, without the legend
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 34, 38  # of them around the plot
LETTER = 6.6  # pixels of a digit
BUCKETS = 240  # of a long line: a chart has few more pixels
SERIES = 8  # colors of lines, used in turn: --c0 to --c7 of the style sheet
STYLE = Path(__file__).with_name("page.css")


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
    """Curves over one horizontal axis. `marks` are dashed vertical lines.

    `x_ticks` replace round numbers where they do not overlap.
    """

    title: str
    lines: Sequence[Line]
    x_label: str = "step"
    marks: Sequence[float] = ()
    note: str = ""
    from_zero: bool = False
    x_ticks: Sequence[tuple[float, str]] = ()


def buckets(
    xs: Sequence[float], ys: Sequence[float]
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return the lowest and the highest value of each of BUCKETS parts, so that peaks stay, and
    the parts' means.

    A part without a finite value interrupts the first, and is left out of the means.
    """
    extremes, means, count = [], [], len(xs)
    for i in range(BUCKETS):
        first, end = i * count // BUCKETS, (i + 1) * count // BUCKETS
        pairs = zip(xs[first:end], ys[first:end], strict=True)
        part = [(x, y) for x, y in pairs if math.isfinite(y)]
        if part:
            by_height = sorted(part, key=lambda point: point[1])
            extremes += sorted((by_height[0], by_height[-1]))
            means.append((part[0][0], fmean(y for _, y in part)))
        else:
            extremes.append((xs[first], math.nan))
    return extremes, means


def render(chart: Chart) -> str:
    """Return a <div> of the plot and its legend, whose colors are CSS variables."""
    points = [[*zip(line.xs, line.ys, strict=True)] for line in chart.lines]
    every = [(x, y) for each in points for x, y in each if math.isfinite(y)]
    x_low, x_high = _range([x for x, _ in every], margin=0.02)
    y_low, y_high = _range([y for _, y in every], margin=0.05)
    if chart.from_zero:
        y_low = min(0.0, *[y for _, y in every], 0.0)

    def at(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def level(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    title, bottom = escape(chart.title, quote=True), HEIGHT - BOTTOM
    parts = [
        '<div class="chart">'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{title}" font-size="12" '
        'font-family="system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif">',
        f'<text x="{LEFT - 46}" y="20" font-size="14" font-weight="600" '
        f'fill="var(--text)">{title}</text>',
        label(WIDTH - RIGHT, 20, chart.note, anchor="end"),
        label(WIDTH - RIGHT, bottom + 32, chart.x_label, anchor="end"),
    ]
    for y in ticks(y_low, y_high):
        parts.append(_rule((LEFT, level(y)), (WIDTH - RIGHT, level(y)), "grid"))
        parts.append(label(LEFT - 8, level(y) + 4, number(y), anchor="end"))
    free = 0.0
    for x, text in chart.x_ticks or [(x, number(x)) for x in ticks(x_low, x_high)]:
        half = LETTER * len(text) / 2
        if at(x) - half >= free:
            parts.append(label(at(x), bottom + 17, text, anchor="middle"))
            free = at(x) + half + 6
    for x in chart.marks:
        if x_low <= x <= x_high:
            parts.append(_rule((at(x), TOP), (at(x), bottom), "mark", 'stroke-dasharray="4 3"'))
    for line, own in zip(chart.lines, points, strict=True):
        parts += _curve(line, [(at(x), level(y)) for x, y in own])
    if not every:
        parts.append(label(WIDTH / 2, HEIGHT / 2, "no values yet", anchor="middle"))
    return "".join([*parts, "</svg>", _legend(chart), "</div>"])


def _range(values: list[float], *, margin: float) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    pad = margin * (high - low) or abs(high) * 0.1 or 0.5
    return low - pad, high + pad


def _curve(line: Line, points: list[tuple[float, float]]) -> Iterator[str]:
    color = f"var(--c{line.color % SERIES})"
    pieces: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    for piece in pieces:
        if len(piece) > 1:
            yield (
                f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in piece)}" fill="none" '
                f'stroke="{color}" stroke-width="{line.width}" '
                f'stroke-opacity="{line.opacity}" stroke-linejoin="round"/>'
            )
        for x, y in piece if line.dots or len(piece) == 1 else ():
            title = f"><title>{escape(line.title)}</title></circle>" if line.title else "/>"
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"{title}'


def _rule(start: tuple[float, float], end: tuple[float, float], color: str, more: str = "") -> str:
    (x1, y1), (x2, y2) = start, end
    return (
        f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" '
        f'stroke="var(--{color})" {more}/>'
    )


def label(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    """Return a text beside the plot."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" '
        f'fill="var(--quiet)">{escape(text)}</text>'
    )


def _legend(chart: Chart) -> str:
    """Return what the colors mean. A single curve needs no legend."""
    named = [line for line in chart.lines if line.label]
    marks = (
        f'<span style="color:var(--c{line.color % SERIES})">■</span> {escape(line.label)}'
        for line in named
    )
    return f"<p>{' &#160; '.join(marks)}</p>" if len(named) > 1 else ""


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers within the range, about six of them."""
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    size = next((step * power for step in (1, 2, 2.5, 5) if step * power >= rough), 10 * power)
    return [i * size for i in range(math.ceil(low / size), math.floor(high / size) + 1)]


def number(value: float) -> str:
    """Return a short number for an axis: 0.25, 1500, 20k, 2M, 0.0003."""
    size = abs(value)
    for limit, least, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e3, 1e4, "k")):
        if 1e15 > size >= least:
            return f"{value / limit:.4g}{unit}"
    return f"{value:.4g}" if 1e-3 <= size < 1e5 else f"{value:.2g}"
