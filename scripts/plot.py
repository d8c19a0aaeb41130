"""Draw curves of one run or several as SVG.

python scripts/plot.py outputs/mine
    its loss, in outputs/mine/train-loss.svg
python scripts/plot.py outputs/a outputs/b out=loss.svg
    both runs over each other
python scripts/plot.py outputs/a --metric val/loss --log --x tokens
    any column of metrics.csv or timings.csv
python scripts/plot.py outputs/a out=loss.svg --theme both
    loss-light.svg and loss-dark.svg, for <picture>

A run that trains may be drawn at any time. Curves that coincide lie in each other with --nested.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from armature import cli
from armature.pages import chart, compare, curves, history


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", help="run directories")
    parser.add_argument(
        "--metric", default="train/loss", help="a column of metrics.csv or timings.csv (train/loss)"
    )
    parser.add_argument(
        "--x", default="step", help="the horizontal axis: step, epoch, samples or tokens (step)"
    )
    parser.add_argument("--log", action="store_true", help="a logarithmic vertical axis")
    parser.add_argument(
        "--smooth",
        type=int,
        metavar="VALUES",
        help="an odd number of values to average over; 1: none (a 40th of all)",
    )
    parser.add_argument(
        "--nested", action="store_true", help="draw each run thinner than the one before"
    )
    parser.add_argument("--title", help="instead of the metric's name")
    parser.add_argument(
        "--theme",
        choices=("auto", "light", "dark", "both"),
        default="auto",
        help="auto: the reader's",
    )
    parser.add_argument("--out", type=Path, help="the file to write (or out=FILE)")
    args = parser.parse_intermixed_args()  # out=FILE may follow an option
    words, out = cli.out_file(args.runs, args.out)
    runs = read_runs([Path(word) for word in words], parser)
    if args.smooth is not None and args.smooth < 1:
        parser.error(
            f"--smooth {args.smooth}: type a number of values of at least 1; 1 does not smooth"
        )
    if args.smooth is not None and args.smooth % 2 == 0:
        parser.error(
            f"--smooth {args.smooth}: the mean is centered. Type --smooth {args.smooth + 1}"
        )
    problems = missing(runs, args.metric, args.x)
    if args.log and not problems:
        below = [
            run
            for run in runs
            if not any(value > 0 for value in run.curve(args.metric, x=args.x)[1])
        ]
        problems = [
            f"--log: {run.path} has no {args.metric} above 0. Leave it out." for run in below
        ]
    if problems:
        cli.refuse(problems)
    out = out or runs[0].path / f"{args.metric.replace('/', '-')}.svg"
    if problems := cli.output_problems("out=", out, ".svg"):
        cli.refuse(problems)
    drawn = draw(
        runs,
        args.metric,
        x=args.x,
        log=args.log,
        window=args.smooth,
        nested=args.nested,
        title=args.title,
    )
    for file in write(drawn, out, args.theme):
        print(file)


def read_runs(paths: list[Path], parser: argparse.ArgumentParser) -> list[history.History]:
    """Return the runs in the directories, with names that differ."""
    if not paths:
        parser.error("which runs? Type outputs/<run.name>")
    if problems := history.not_runs(paths):
        cli.refuse(problems)
    return compare.named_apart([history.read(path) for path in paths])


def missing(runs: list[history.History], metric: str, x: str) -> list[str]:
    """Return a problem for each run without values."""
    problems = []
    for run in runs:
        names = [name for name in run.columns("") if name != "step" and run.curve(name)[0]]
        if (
            wrong := next(
                (name for name in (x, metric) if name != "step" and name not in names), None
            )
        ) is not None:
            option = "--x" if wrong == x else "--metric"
            problems.append(
                f"{option} {wrong}: {run.path} has no such values. It has "
                f"{', '.join(names) or 'none yet'}."
            )
        elif not run.curve(metric, x=x)[0]:
            problems.append(
                f"--x {x}: {run.path} has no {x} in the rows of {metric}. Type --x step."
            )
    return problems


def draw(
    runs: list[history.History],
    metric: str,
    *,
    x: str = "step",
    log: bool = False,
    window: int | None = None,
    nested: bool = False,
    title: str | None = None,
) -> chart.Chart:
    """Return the chart.

    `nested`: the first curve is the widest, so that all that coincide are seen.
    """
    drawn = curves.metric(runs, metric, window=1 if nested else window, x=x, marks=len(runs) == 1)
    lines = [
        replace(line, width=2.2 * (len(runs) - i), dots=False) if nested else line
        for i, line in enumerate(drawn.lines)
    ]
    return chart.Chart(
        title=title or metric,
        lines=lines,
        x_label=x,
        log=log,
        marks=drawn.marks,
        width=760,
        height=340,
    )


def write(drawn: chart.Chart, out: Path, theme: str) -> list[Path]:
    """Write the chart, for both themes into files of their own. Return the files."""
    files = (
        {t: out.with_stem(f"{out.stem}-{t}") for t in ("light", "dark")}
        if theme == "both"
        else {theme: out}
    )
    for name, file in files.items():
        cli.write_output("out=", file, chart.standalone(chart.render(drawn), name))
    return [*files.values()]


if __name__ == "__main__":
    main()
