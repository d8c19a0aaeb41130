"""report.html of a sweep: the ranked table, the importance of the keys, and the metric over each
key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from armature.errors import masked
from armature.pages import chart
from armature.pages.page import page, plain_charts, table
from armature.sweeps import repeats, trials
from armature.sweeps.trials import Sweep

MOST_LETTERS = 40  # of a key's values that are named at its axis; with more, round numbers are


def html(sweep: Sweep, shares: Mapping[str, float]) -> str:
    """Return the page."""
    name, (head, *rows) = sweep.path.name, trials.table(sweep)
    best = ["best"] if sweep.ranked else []
    body = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="quiet">{escape(sweep.headline)}</p>',
        table([[escape(cell) for cell in row] for row in rows], head, classes=best),
    ]
    if averages := repeats.averages(sweep.trials):
        body.append("<h2>Mean ± standard deviation over seeds and folds</h2>")
        rows = [[escape(cell) for cell in row] for row in averages]
        body.append(table(rows[1:], rows[0]))
    if shares:
        body.append(
            '<h2>Importance</h2><p class="quiet">Share in the differences of the metric.</p>'
        )
        body.append(
            table([[escape(key), f"{share:.0%}", _bar(share)] for key, share in shares.items()])
        )
    if len(sweep.ranked) > 1:
        title = f"{sweep.monitor} by value"
        body.append(
            f'<h2>{escape(title)}</h2><p class="quiet">One dot per trial, the best in orange.</p>'
        )
        body.append(plain_charts([_scatter(sweep, key) for key in sweep.keys]))
    return masked(page(name, body))


def _bar(share: float) -> str:
    return f'<div class="bar" style="width:{max(1, 140 * share):.0f}px"></div>'


def _scatter(sweep: Sweep, key: str) -> chart.Chart:
    """Return the metric over one key: numbers on a linear or logarithmic axis, words side by
    side.
    """
    texts = sorted({trial.values.get(key, "–") for trial in sweep.ranked})
    found = {text: trials.as_number(text) for text in texts}
    numbers = {text: number for text, number in found.items() if number is not None}
    words = len(numbers) < len(texts)
    log = (
        not words
        and min(numbers.values()) > 0
        and max(numbers.values()) > 50 * min(numbers.values())
    )
    if words:
        places = {text: float(i) for i, text in enumerate(texts)}
    else:
        places = {text: math.log10(number) if log else number for text, number in numbers.items()}
    ticks = [(place, trials.short(text)[:24]) for text, place in places.items()]
    if not words and sum(map(len, texts)) > MOST_LETTERS:
        ends = min(numbers.values()), max(numbers.values())
        rounded = chart.log_ticks(*ends) if log else chart.linear_ticks(*ends)
        ticks = [
            (math.log10(number) if log else number, chart.number(number)) for number in rounded
        ]
    dots, best = [], sweep.ranked[0]
    for trial in reversed(sweep.ranked):  # the best on top
        text, metric = trial.values.get(key, "–"), trial.metric or 0.0
        dots.append(
            chart.Line(
                xs=[places[text]], ys=[metric], color=int(trial is best), width=4.5,
                title=f"trial {trial.number}: {text}, {metric:.5g}",
            )
        )  # fmt: skip
    return chart.Chart(
        title=key,
        lines=dots,
        x_label="log scale" if log else "",
        x_ticks=sorted(ticks),
        x_margin=0.06,
    )
