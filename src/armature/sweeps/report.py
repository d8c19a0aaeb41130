"""report.html of a sweep: the ranked table, the importance of the keys, and the metric over each
key.
"""

from collections.abc import Mapping
from html import escape

from armature.errors import masked
from armature.pages import chart
from armature.pages.page import charts, page, table
from armature.sweeps import repeats, trials
from armature.sweeps.trials import Sweep


def html(sweep: Sweep, shares: Mapping[str, float]) -> str:
    """Return the page."""
    name, (head, *rows) = sweep.path.name, trials.table(sweep)
    best = ["best"] if sweep.ranked else []
    body = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="quiet">{escape(sweep.headline)}</p>',
        table([[escape(cell) for cell in row] for row in rows], head, classes=best),
    ]
    if averages := repeats.averages(sweep):
        body.append("<h2>Mean ± standard deviation over seeds and folds</h2>")
        rows = [[escape(cell) for cell in row] for row in averages]
        body.append(table(rows[1:], rows[0]))
    if shares:
        body.append(
            '<h2>Importance</h2><p class="quiet">Share in the differences of the metric.</p>'
        )
        body.append(table([escape(key), f"{share:.0%}"] for key, share in shares.items()))
    if len(sweep.ranked) > 1:
        title = f"{sweep.monitor} by value"
        body.append(
            f'<h2>{escape(title)}</h2><p class="quiet">One dot per trial, the best in orange.</p>'
        )
        body.append(charts([_scatter(sweep, key) for key in sweep.keys]))
    return masked(page(name, body))


def _scatter(sweep: Sweep, key: str) -> chart.Chart:
    """Return the metric over one key, whose values stand side by side in their order."""
    typed = {trial.values.get(key, "–") for trial in sweep.ranked}
    texts = sorted(typed, key=lambda text: (trials.as_number(text) or 0.0, text))
    dots, best = [], sweep.ranked[0]
    for trial in reversed(sweep.ranked):  # the best on top
        text, metric = trial.values.get(key, "–"), trial.metric or 0.0
        dots.append(
            chart.Line(
                xs=[texts.index(text)], ys=[metric], color=int(trial is best),
                title=f"trial {trial.number}: {text}, {metric:.5g}",
            )
        )  # fmt: skip
    ticks = [(i, trials.short(text)[:24]) for i, text in enumerate(texts)]
    return chart.Chart(title=key, lines=dots, x_label="", x_ticks=ticks)
