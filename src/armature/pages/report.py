"""report.html: one run on one page, made of the files in its directory."""

import base64
import struct
import time
import zlib
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from armature.errors import masked
from armature.launcher import run_state
from armature.pages import curves
from armature.pages.compare import results
from armature.pages.history import History, flat, read
from armature.pages.page import charts, code, number, page, table, tile

NAME = "report.html"
SAMPLES = 12  # shown at most: the first, the newest and those between


def make(path: Path) -> str:
    """Return the page of a run directory."""
    run = read(path)
    body = [*_head(run), _tiles(run)]
    for title, drawn in (
        ("Learning", curves.learning([run])),
        ("Experts", curves.experts(run)),
        ("Learning rate and speed", curves.speed([run])),
        ("Memory", curves.memory(run)),
    ):
        if drawn:
            body += [f"<h2>{title}</h2>", charts(drawn)]
    body += [*_samples(run), *_starts(run), *_configuration(run), *_environment(run)]
    return masked(page(f"{run.name} · {run.config.get('task._target_') or 'run'}", body))


def _head(run: History) -> Iterator[str]:
    state = run_state.state(run.path, run.summary)
    kind = state.partition(" ")[0]
    made = time.strftime("%Y-%m-%d %H:%M")
    yield f'<h1>{escape(run.name)}</h1><p><span class="state {kind}">{escape(state)}</span> '
    yield f'<span class="quiet">as of {made} · {escape(str(run.path))}</span></p>'
    if notes := run.config.get("run.notes"):
        yield f"<p>{escape(str(notes))}</p>"
    if tags := run.config.get("run.tags"):
        listed = ", ".join(map(str, tags)) if isinstance(tags, list) else str(tags)
        yield f'<p class="quiet">{escape(listed)}</p>'


def _tiles(run: History) -> str:
    start = run.starts[-1] if run.starts else {}
    planned = run.summary.get("planned_steps") or start.get("planned_steps")
    found = {
        f"best {name}" if run.is_of_validation(name) else name: number(value)
        for name, (value,) in results([run]).items()
    }
    found["parameters"] = number(run.summary.get("parameters") or start.get("parameters"))
    found["restarts"] = str(max(0, len(run.starts) - 1))
    if planned:
        found["optimizer steps"] = f"{found.get('optimizer steps', 0)} of {number(planned)}"
    return f'<div class="tiles">{"".join(tile(*each) for each in found.items())}</div>'


def _samples(run: History) -> Iterator[str]:
    texts = [
        event
        for event in run.events
        if event["event"] == "text" and isinstance(event.get("text"), str)
    ]
    images = [
        event
        for event in run.events
        if event["event"] == "images" and isinstance(event.get("images"), list)
    ]
    if not texts and not images:
        return
    yield "<h2>Samples over time</h2>"
    for kind, show in ((texts, _show_text), (images, _show_images)):
        chosen = spread(kind, SAMPLES)
        for event in reversed(chosen):
            is_open = " open" if event is chosen[-1] or event is chosen[0] else ""
            summary = f"<summary>step {event['step']:,}</summary>"
            yield f"<details{is_open}>{summary}{show(event)}</details>"


def spread(items: list[Any], count: int) -> list[Any]:
    """Return the first, the last, and evenly spaced ones between."""
    if len(items) <= count:
        return items
    return [items[i * (len(items) - 1) // (count - 1)] for i in range(count)]


def _show_text(event: dict[str, Any]) -> str:
    return f"<pre>{escape(event['text'])}</pre>"


def _show_images(event: dict[str, Any]) -> str:
    figures = []
    for image in event["images"]:
        try:
            address = png(image["pixels"], width=int(image["width"]), height=int(image["height"]))
        except (KeyError, TypeError, ValueError):
            continue  # a damaged line
        predicted, target = str(image.get("predicted", "")), str(image.get("target", ""))
        wrong = bool(target) and predicted != target
        said = f"{predicted}, not {target}" if wrong else predicted
        kind = ' class="wrong"' if wrong else ""
        figures.append(
            f'<figure{kind}><img src="{address}" '
            f'alt="{escape(said, quote=True)}">{escape(said)}</figure>'
        )
    return f'<div class="images">{"".join(figures)}</div>'


def png(pixels: str, *, width: int, height: int) -> str:
    """Return base64 of gray or RGB bytes, row by row, as the address of a PNG."""
    raw = base64.b64decode(pixels, validate=True)
    channels, rest = divmod(len(raw), width * height) if width > 0 and height > 0 else (0, 1)
    if rest or channels not in (1, 3):
        raise ValueError(f"{len(raw)} bytes are no {width} × {height} image")
    line = width * channels
    rows = b"".join(b"\0" + raw[i : i + line] for i in range(0, len(raw), line))

    def part(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    file = (
        b"\x89PNG\r\n\x1a\n"
        + part(b"IHDR", head)
        + part(b"IDAT", zlib.compress(rows))
        + part(b"IEND", b"")
    )
    return "data:image/png;base64," + base64.b64encode(file).decode()


def _starts(run: History) -> Iterator[str]:
    if not run.starts:
        return
    yield "<h2>Starts</h2>"
    keys = ("time", "step", "layout", "ranks", "precision", "host")
    rows = [[escape(number(start.get(key, ""))) for key in keys] for start in run.starts]
    yield table(rows, ("started", "from step", "layout", "ranks", "precision", "machine"))


def _configuration(run: History) -> Iterator[str]:
    if not run.config:
        return
    file = run.path / "overrides.txt"
    typed = file.read_text(errors="replace").split("\n") if file.is_file() else []
    keys = {line.lstrip("+~").partition("=")[0] for line in typed}
    differing = {key for key in run.config if keys & {key, key.partition(".")[0]}}
    yield "<h2>Configuration</h2>"
    yield f'<p class="quiet">Bold: what was typed, {code(" ".join(typed))}.</p>'
    yield '<div><input type="checkbox" class="only" id="only"> <label for="only">only these</label>'
    rows, classes = [], []
    for key, value in run.config.items():
        name, shown = escape(key), code(value)
        rows.append([f"<b>{name}</b>", f"<b>{shown}</b>"] if key in differing else [name, shown])
        classes.append("" if key in differing else "usual")
    yield table(rows, classes=classes) + "</div>"


def _environment(run: History) -> Iterator[str]:
    if run.starts:
        yield "<h2>Environment of the newest start</h2>"
        facts = {key: value for key, value in flat(run.starts[-1]) if value is not None}
        del facts["event"]
        yield table([[escape(key), code(value)] for key, value in facts.items()])
