"""Make the images of README.md from real runs: python -m benchmarks.readme_images [curves] [killed]
[terminal].

Runs of minutes on two cores, in outputs/images/; the images go to docs/images/, for light and for
dark pages.
"""

import fcntl
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path

from armature.pages import chart, history
from scripts import plot

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
STEPS = 150
TRAINED = [
    "experiment=parity",
    f"trainer.max_steps={STEPS}",
    "data.micro_batch_size=auto",
    "logger=none",
    "run.report=false",
    "trainer.val_every_n_steps=null",
]
LAYOUTS = {
    "single": ["strategy=single"],
    "ddp × 2": ["strategy=ddp", "trainer.devices=2"],
    "fsdp × 2": ["strategy=fsdp", "trainer.devices=2"],
    "tensor × 2": ["strategy=tensor", "trainer.devices=2"],
    "pipeline × 2": ["strategy=pipeline", "trainer.devices=2"],
    "2 × 2 × 2 (pipeline, shard, tensor)": ["strategy=3d", "trainer.devices=8"],
}
KILLS = (47, 91, 128)  # optimizer steps after which the process is killed
COLUMNS, ROWS = 118, 40
SHOWN_AT = 0.55  # of the run: when the terminal is copied
COLORS = {"light": "DEFAULT_TERMINAL_THEME", "dark": "SVG_EXPORT_THEME"}


def main() -> None:
    chosen = sys.argv[1:] or ["curves", "killed", "terminal"]
    IMAGES.mkdir(exist_ok=True)
    for name in chosen:
        folder = ROOT / "outputs" / "images" / name
        folder.mkdir(parents=True, exist_ok=True)
        {"curves": draw_curves, "killed": draw_killed, "terminal": copy_terminal}[name](folder)


def train(folder: Path, name: str, *overrides: str) -> int:
    """Train, and return the exit code."""
    command = [sys.executable, str(ROOT / "train.py"), *TRAINED, f"run.name={name}", *overrides]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode not in (0, -signal.SIGKILL, 128 + signal.SIGKILL):
        sys.exit(f"{shlex.join(command)}\n{result.stderr}")
    return result.returncode


def draw_curves(folder: Path) -> None:
    for i, overrides in enumerate(LAYOUTS.values()):
        train(folder, str(i), *overrides)
    runs = [history.read(folder / "outputs" / str(i)) for i in range(len(LAYOUTS))]
    named = [
        replace(run, config={"run.name": name}) for run, name in zip(runs, LAYOUTS, strict=True)
    ]
    losses = [run.curve("train/loss")[1] for run in runs]
    far = max(
        abs(a - b) / abs(b) for each in losses[1:] for a, b in zip(each, losses[0], strict=True)
    )
    drawn = plot.draw(
        named, "train/loss", nested=True, title="One configuration under six layouts: train/loss"
    )
    write(drawn, "layouts", note=f"largest difference {far:.0e}")


def draw_killed(folder: Path) -> None:
    shutil.rmtree(folder / "outputs", ignore_errors=True)
    train(folder, "undisturbed", "checkpoint.every_n_steps=20")
    target = "_target_:armature.callbacks.stop_at.StopAt"
    stops = [f"+callbacks.stop_{step}={{{target},signals:{{SIGKILL:{step}}}}}" for step in KILLS]
    codes = [
        train(folder, "killed", "checkpoint.every_n_steps=20", *stops)
        for _ in range(len(KILLS) + 1)
    ]
    if [code == 0 for code in codes] != [False] * len(KILLS) + [True]:
        sys.exit(f"the run was not killed {len(KILLS)} times: exit codes {codes}")
    files = [folder / "outputs" / name / "metrics.csv" for name in ("undisturbed", "killed")]
    equal = files[0].read_bytes() == files[1].read_bytes()
    runs = [history.read(file.parent) for file in files]
    drawn = plot.draw(
        runs, "train/loss", nested=True, title="Killed three times, resumed: train/loss"
    )
    lines = [
        replace(line, width=width) for line, width in zip(drawn.lines, (7.0, 2.0), strict=True)
    ]
    drawn = replace(drawn, lines=lines, marks=[(step, "kill -9") for step in KILLS])
    write(drawn, "killed", note="equal in every bit" if equal else "NOT equal")


def write(drawn: chart.Chart, name: str, *, note: str) -> None:
    for file in plot.write(replace(drawn, note=note), IMAGES / f"{name}.svg", "both"):
        print(f"{file.relative_to(ROOT)}: {note}")


def copy_terminal(folder: Path) -> None:
    """Copy the progress bar of a run, and the message about mistakes, as a terminal shows them."""
    shown = [
        "experiment=digits",
        "strategy=ddp",
        "trainer.devices=2",
        "trainer.max_epochs=8",
        "run.name=digits",
    ]
    wrong = ["trainer.devces=2", "strategy=fspd", "trainer.max_epocs=3"]
    lines = []
    shutil.rmtree(folder / "outputs", ignore_errors=True)
    for overrides in (shown, wrong):
        lines += [
            f"\x1b[1m$ python train.py {' '.join(overrides)}\x1b[0m",
            *screen(overrides, folder),
            "",
        ]
    for theme, colors in COLORS.items():
        (IMAGES / f"terminal-{theme}.svg").write_text(as_svg(lines, colors), encoding="utf-8")


def screen(overrides: list[str], folder: Path) -> list[str]:
    """Run train.py in a terminal and return its lines, with their colors, when the bar has come to
    SHOWN_AT.
    """
    child, terminal = pty.fork()
    if not child:
        os.chdir(folder)
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
        os.execv(sys.executable, [sys.executable, str(ROOT / "train.py"), *overrides])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    text, shown = "", None
    while True:
        try:
            text += os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # the program has ended
            break
        lines = visible(text)
        bar = re.search(
            r"step\s+(\d+)/(\d+)", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", lines[-1] if lines else "")
        )
        if bar and shown is None and int(bar[1]) >= SHOWN_AT * int(bar[2]):
            shown = lines
            os.kill(child, signal.SIGTERM)  # the rest is not shown
    os.waitpid(child, 0)
    return visible(text) if shown is None else shown


def visible(text: str) -> list[str]:
    """Return a terminal's lines after the escape sequences that rich writes: up, erase a line,
    colors.
    """
    lines, row = [""], 0
    for part in re.split(r"(\r|\n|\x1b\[[\d;?]*[A-HJKlh])", text):
        if part == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif re.fullmatch(r"\x1b\[\d*A", part):
            row = max(0, row - int(part[2:-1] or 1))
        elif part.endswith("K") and part.startswith("\x1b"):
            lines[row] = ""
        elif part and part != "\r" and not re.fullmatch(r"\x1b\[[\d;?]*[A-HJlh]", part):
            lines[row] += part
    while lines and not re.sub(r"\x1b\[[\d;]*m", "", lines[-1]).strip():
        lines.pop()
    return lines


def as_svg(lines: list[str], colors: str) -> str:
    from rich import terminal_theme
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    for line in [*lines, " "]:  # rich cuts the underscores of the last one
        console.print(Text.from_ansi(line), overflow="fold", highlight=False)
    text = console.export_svg(
        title="Armature", theme=getattr(terminal_theme, colors), unique_id="terminal"
    )
    return re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL)  # fonts of a server


if __name__ == "__main__":
    main()
