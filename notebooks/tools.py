"""What the notebooks share: commands with their output, curves, and a fresh folder for the runs."""

import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from IPython.display import HTML, display

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from armature.pages import chart, history
from armature.pages.curves import metric as metric_of


def fresh(name: str) -> Path:
    """Return an empty folder for the runs of a notebook."""
    folder = ROOT / "outputs" / "notebooks" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def run(command: str, *, folder: Path, expect: int | None = 0, last: int = 12) -> None:
    """Run a command of this project in a folder, and print what it prints: of much, the last lines.

    Args:
        expect: the exit code that it must have; None: any.
    """
    print(f"$ {command}")
    words = shlex.split(command)
    words[:1] = [sys.executable] if words[0] == "python" else [words[0]]
    scripts = folder if (folder / "train.py").exists() else ROOT
    words = [
        str(scripts / word) if word == "train.py" or word.startswith("scripts/") else word
        for word in words
    ]
    started = time.monotonic()
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.endswith(("FORCE_COLOR", "CLICOLOR_FORCE"))
    }
    plain |= {"TERM": "dumb", "NO_COLOR": "1"}  # a kernel asks for colors and bars
    result = subprocess.run(words, cwd=folder, env=plain, capture_output=True, text=True)
    lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
    resumed = [line for line in lines[:-last] if line.startswith("resuming")]
    print(
        "\n".join(["…", *resumed, *lines[-last:]] if len(lines) > last else lines).replace(
            str(ROOT), "…"
        )
    )
    ending = f"exit code {result.returncode}, " if result.returncode else ""
    print(f"({ending}{time.monotonic() - started:.0f} s)")
    if expect is not None and result.returncode != expect:
        raise RuntimeError(f"exit code {result.returncode}:\n{result.stderr}")


def curves(runs: dict[str, Path], metric: str, *, nested: bool = False) -> None:
    """Show one metric of several runs, by the names that the legend gives them.

    `nested`: the first curve is the widest, so that all that coincide are seen.
    """
    found = []
    for name, path in runs.items():
        found.append(history.read(path, name=name))
    starts = [start["step"] for start in found[0].starts if start["step"]]
    drawn = metric_of(found, metric, raw=nested, marks=starts if len(found) == 1 else [])
    if nested:
        widths = [2.2 * (len(found) - i) for i in range(len(found))]
        lines = [
            replace(line, width=width, dots=False)
            for line, width in zip(drawn.lines, widths, strict=True)
        ]
        drawn = replace(drawn, lines=lines)
    colors = chart.STYLE.read_text(encoding="utf-8").partition("* {")[0]
    display(HTML(f"<style>{colors}</style>{chart.render(drawn)}"))


def losses(path: Path) -> list[float]:
    return history.read(path).curve("train/loss")[1]


def furthest(a: list[float], b: list[float]) -> float:
    """Return the largest relative difference of two curves of one length."""
    assert len(a) == len(b)
    return max(
        (abs(x - y) / max(abs(x), math.ulp(1.0)) for x, y in zip(a, b, strict=True)), default=0.0
    )
