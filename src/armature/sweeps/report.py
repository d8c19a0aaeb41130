"""report.html of a sweep: one self-contained file with the ranked table, the importance of the keys, and plots."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from armature.sweeps import trials
from armature.sweeps.trials import Sweep

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --paper: #fff; --faint: #8a8a8e; --line: #e2e2e6; --mark: #2f6fde; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececf0; --paper: #17171a; --faint: #8e8e96; --line: #33333a; --mark: #7aa7ff; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin-top: 2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
tr.best td { font-weight: 600; } p { color: var(--faint); }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: 1.2rem; }
svg { width: 100%; height: auto; } svg text { font-size: 10px; fill: var(--faint); }
svg line { stroke: var(--line); } svg circle { fill: var(--mark); fill-opacity: .75; } svg rect { fill: var(--mark); }
"""
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 320, 200, 46, 28, 12  # of a plot


def html(sweep: Sweep, shares: Mapping[str, float]) -> str:
    """Return the page."""
    name, rows = escape(sweep.path.name), trials.table(sweep)
    plots = [_scatter(sweep, key) for key in sweep.keys] if len(sweep.ranked) > 1 else []
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>',
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style>',
        f"<h1>{name}</h1><p>{sweep.finished} of {len(rows) - 1} trials finished. "
        f"{escape(sweep.monitor)}, {sweep.order} first.</p>",
        f'<div class="wide"><table>{"".join(_row(row, i) for i, row in enumerate(rows))}</table></div>',
    ]
    if shares:
        parts.append(f"<h2>Importance</h2><p>Share in the differences of the metric.</p>{_bars(shares)}")
    if plots:
        parts.append(f'<h2>{escape(sweep.monitor)} by value</h2><div class="plots">{"".join(plots)}</div>')
    return "\n".join(parts) + "\n"


def _row(cells: list[str], i: int) -> str:
    tag = "td" if i else "th"
    best = ' class="best"' if cells[0] == "1" else ""
    return f"<tr{best}>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _bars(shares: Mapping[str, float]) -> str:
    bars = []
    for i, (key, share) in enumerate(shares.items()):
        y = 22 * i
        bars.append(
            f'<text x="0" y="{y + 14}">{escape(key)}</text><rect x="170" y="{y + 4}" width="{max(1, 240 * share):.0f}" '
            f'height="12" rx="2"/><text x="{176 + 240 * share:.0f}" y="{y + 14}">{share:.0%}</text>'
        )
    return f'<svg viewBox="0 0 460 {22 * len(shares)}" style="max-width: 34rem">{"".join(bars)}</svg>'


def _scatter(sweep: Sweep, key: str) -> str:
    """Return a plot of the metric over one key: numbers on a linear or logarithmic axis, words side by side."""
    pairs = [(trial.values.get(key, "–"), trial.metric) for trial in sweep.ranked]
    words = sorted({text for text, _ in pairs})
    numbers = [trials.as_number(text) for text in words]
    spans = all(number is not None and number > 0 for number in numbers)
    spans = spans and max(filter(None, numbers), default=0) > 50 * min(filter(None, numbers), default=1)
    if None in numbers:
        place = {text: float(i) for i, text in enumerate(words)}
    else:
        place = {text: math.log10(n) if spans else n for text, n in zip(words, numbers, strict=True) if n is not None}
    xs, ys = list(place.values()), [metric for _, metric in pairs if metric is not None]
    points = "".join(
        f'<circle cx="{_scaled(place[text], xs, LEFT + 8, WIDTH - 14):.1f}" '
        f'cy="{_scaled(metric, ys, HEIGHT - BOTTOM - 6, TOP):.1f}" r="4">'
        f"<title>{escape(text)}: {metric:.5g}</title></circle>"
        for text, metric in pairs
        if metric is not None
    )
    ends = sorted(place, key=lambda text: place[text])
    return (
        f'<figure style="margin:0"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f'<line x1="{LEFT}" x2="{LEFT}" y1="{TOP - 6}" y2="{HEIGHT - BOTTOM}"/>'
        f'<line x1="{LEFT}" x2="{WIDTH}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>{points}'
        f'<text x="0" y="{TOP + 4}">{max(ys):.4g}</text><text x="0" y="{HEIGHT - BOTTOM - 2}">{min(ys):.4g}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 14}">{escape(trials.short(ends[0]))}</text>'
        f'<text x="{WIDTH - 2}" y="{HEIGHT - 14}" text-anchor="end">{escape(trials.short(ends[-1]))}</text>'
        f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 2}" text-anchor="middle">'
        f"{escape(key)}{' (log)' if spans else ''}</text></svg></figure>"
    )


def _scaled(value: float, values: list[float], low: float, high: float) -> float:
    span = max(values) - min(values)
    return (low + high) / 2 if span == 0 else low + (value - min(values)) / span * (high - low)
