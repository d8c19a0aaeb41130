"""What the pages share: one self-contained HTML file, which a browser lets neither load nor run
anything.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from armature.pages import chart

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


def page(title: str, body: Iterable[str]) -> str:
    """Return a whole page. Every part of `body` is HTML, whose texts are escaped already."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{chart.STYLE.read_text(encoding='utf-8')}</style></head><body><main>",
            *body,
            "</main></body></html>\n",
        ]
    )


def charts(drawn: Iterable[chart.Chart]) -> str:
    return f'<div class="charts">{"".join(map(chart.render, drawn))}</div>'


def tile(name: str, value: str) -> str:
    return f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'


def table(
    rows: Iterable[Sequence[str]], head: Sequence[str] = (), *, classes: Sequence[str] = ()
) -> str:
    """Return a table of cells that are HTML; `classes` of the rows."""
    kinds = [*classes]
    lines = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"] if head else []
    for i, row in enumerate(rows):
        kind = f' class="{kinds[i]}"' if i < len(kinds) and kinds[i] else ""
        cells = (cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in row)
        lines.append(f"<tr{kind}>{''.join(cells)}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def code(value: Any) -> str:
    """Return a value of a configuration as escaped HTML."""
    return f"<code>{escape(shown(value))}</code>"


def shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return number(value) if isinstance(value, float) else str(value)


def number(value: Any) -> str:
    """Return a number with the digits that a reader wants; text as it is."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if isinstance(value, int) or (abs(value) >= 1e4 and math.isfinite(value)):
        return f"{value:,.0f}"
    return f"{value:.5g}"
