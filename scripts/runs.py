"""List runs: their state, step, best metric, age and size on disk. Write the page of a run, or
compare runs: results with the best in bold, curves over each other, and where they are configured
differently.

python scripts/runs.py                  all runs in outputs/, the newest first
python scripts/runs.py outputs/rates    the trials of a sweep
python scripts/runs.py --sort best      by the metric that each run monitors (checkpoint.monitor)
python scripts/runs.py --json           for other programs
python scripts/runs.py report outputs/mine                write report.html in the run directory
python scripts/runs.py compare outputs/a outputs/b        print a table, and write compare.html
python scripts/runs.py compare outputs/rates/* out=rates.html     the trials of a sweep
python scripts/runs.py compare outputs/adamw outputs/muon         sweeps over equal seeds and folds:
                                        mean ± standard deviation, and paired differences

State: running; finished; stopped by a signal or a limit, and resumable by the same command; failed:
ended without a summary, by an error or because it was killed.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import yaml

from armature.checkpoint import directory
from armature.launcher.run_state import read_summary, state
from armature.launcher.streams import make_lasting
from armature.pages import columns, history
from armature.sweeps import trials

DEPTH = 4  # folders below a typed one in which runs are looked for
COLUMNS = ("run", "state", "step", "best", "age", "size")


@dataclass(frozen=True)
class Run:
    """One run directory.

    `best` is the best value so far of `monitor`, which grows if `mode` is max.
    """

    path: str
    state: str
    step: int | None
    planned_steps: int | None
    monitor: str
    mode: str
    best: float | None
    changed: float  # seconds since 1970
    bytes: int


def main() -> None:
    make_lasting()  # `| head` may end first
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    if word in ("report", "compare"):
        parser.add_argument("command", choices=(word,))
        parser.add_argument("runs", nargs="+", help="run directories, and out=FILE to compare")
        words = parser.parse_args().runs
        return report_on(words) if word == "report" else compare(words)
    parser.add_argument(
        "paths", nargs="*", type=Path, default=[Path("outputs")], help="folders of runs, or runs"
    )
    parser.add_argument("--sort", choices=("age", "best", "size", "run"), default="age")
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    args = parser.parse_args()
    if missing := [str(path) for path in args.paths if not os.path.isdir(path)]:
        parser.error(
            f"no such folder: {', '.join(missing)}. Name the folder of your runs (run.root) alone, "
            "without a word such as list, or train one first"
        )
    found = {
        os.path.realpath(path): path for path in reversed([*find(args.paths)])
    }  # each once, despite links
    runs = sorted(map(describe, found.values()), key=KEYS[args.sort])
    if args.json:
        print(json.dumps([asdict(run) for run in runs], indent=1))
    elif runs:
        print(table(runs, now=time.time()))
    else:
        print(f"No runs in {', '.join(map(str, args.paths))}.", file=sys.stderr)


def report_on(words: list[str]) -> None:
    """Write the page of each run again, or while it trains."""
    from armature import cli, files
    from armature.pages import report

    paths = [Path(word) for word in words]
    pages = [path / report.NAME for path in paths]
    # whether a page can be written is tried by writing, which makes its folder
    problems = history.not_runs(paths) or [
        f"{page}: it cannot be written ({reason}). Copy the run to where you may write."
        for page in pages
        if (reason := files.why_not_writable(page))
    ]
    if problems:
        cli.refuse(problems)
    for path, page in zip(paths, pages, strict=True):
        cli.write_output("", page, report.make(path))
        print(page)


def compare(words: list[str]) -> None:
    """Print a table of runs side by side, and write the page with their curves."""
    from armature import cli
    from armature.pages import compare

    if any(trials.begun(Path(word)) for word in words):
        return compare_configurations(words)
    words, out = cli.out_file(words, None)
    out, named = out or Path("compare.html"), [Path(word) for word in words]
    folders = {path.parent for path in named if os.path.isdir(path)}
    # a sweep's outputs/rates/* also names its trials.csv and report.html
    paths = [path for path in named if not (os.path.isfile(path) and path.parent in folders)]
    problems = history.not_runs(paths)
    if len(paths) < 2:
        problems.append(
            f"{len(paths)} run: name at least two, as in scripts/runs.py compare outputs/a "
            "outputs/b."
        )
    problems += cli.output_problems("out=", out, ".html")
    if problems:
        cli.refuse(problems)
    runs = [history.read(path, name=str(path)) for path in paths]
    print(compare.text(runs))
    cli.write_output("out=", out, compare.make(runs))
    print(out)


def compare_configurations(words: list[str]) -> None:
    """Print the statistics of the configurations of sweeps, each compared with the first."""
    from armature import cli
    from armature.sweeps import repeats

    found, labels = [], []
    for word in words:
        sweep = trials.read(Path(word))
        if sweep is None:
            cli.refuse(
                [f"{word}: no sweep. Name directories of sweeps alone, or of runs and out=FILE."]
            )
        of_sweep = repeats.configurations(sweep)
        found += of_sweep
        several = len(of_sweep) > 1
        labels += [f"{word} {i}" if several else word for i, _ in enumerate(of_sweep, start=1)]
    if len(found) < 2:
        count = f"{len(found)} configuration has finished runs."
        cli.refuse([f"{count} Name two sweeps, or one of several configurations."])
    print("\n".join(repeats.compare(found, labels)))


KEYS = {
    "age": lambda run: -run.changed,
    "best": lambda run: (
        math.inf if run.best is None else run.best * (-1 if run.mode == "max" else 1)
    ),
    "size": lambda run: -run.bytes,
    "run": lambda run: run.path,
}


def find(paths: list[Path], *, depth: int = DEPTH) -> Iterator[Path]:
    """Yield every run directory in or below the paths. A run has no run inside."""
    for path in paths:
        if os.path.isfile(path / "config.yaml") and os.path.isfile(path / "overrides.txt"):
            yield path
        elif depth:
            yield from find(folders_in(path), depth=depth - 1)


def folders_in(path: Path) -> list[Path]:
    """Return the folders in a folder; of one that cannot be read, or has been removed meanwhile,
    none.
    """
    try:
        return [Path(entry) for entry in os.scandir(path) if os.path.isdir(entry)]
    except FileNotFoundError:
        return []
    except OSError as error:
        print(f"{path}: not listed ({error.strerror}).", file=sys.stderr)
        return []


def describe(path: Path) -> Run:
    """Read the files of a run. A damaged or missing one leaves its values unknown."""
    checkpoint, summary = settings(path), read_summary(path)
    monitor, mode = str(checkpoint.get("monitor")), str(checkpoint.get("mode"))
    changed, size_bytes = usage(path)
    measured = history.read_table(path / "metrics.csv", ("step", monitor))
    values = [
        each for each in measured.get(monitor, []) if each is not None and math.isfinite(each)
    ]
    saved = directory.checkpoints_in(directory.folder_of(path))
    return Run(
        str(path),
        state(path, summary),
        max([*map(int, measured.get("step", [])[-1:]), *saved], default=None),
        summary.get("planned_steps"),
        monitor,
        mode,
        (max if mode == "max" else min)(values, default=None),
        changed,
        size_bytes,
    )


def usage(path: Path) -> tuple[float, int]:
    """Return when the newest file was changed, and the bytes of all files."""
    changed, size_bytes = 0.0, 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):  # a run that trains removes old checkpoints
                status = os.lstat(os.path.join(folder, name))
                changed, size_bytes = max(changed, status.st_mtime), size_bytes + status.st_size
    return changed, size_bytes


def settings(path: Path) -> dict[str, Any]:
    """Return the group `checkpoint` of config.yaml."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if not (path / "config.yaml").is_file():  # reading a pipe might never end
        return {}
    try:
        found = yaml.load((path / "config.yaml").read_text(encoding="utf-8"), Loader=loader)
        return dict(found["checkpoint"])
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return {}


def table(runs: list[Run], *, now: float) -> str:
    return "\n".join(columns.aligned([COLUMNS, *(cells(run, now) for run in runs)]))


def cells(run: Run, now: float) -> tuple[str, ...]:
    planned = f"/{run.planned_steps}" if run.planned_steps is not None else ""
    step = f"{run.step}{planned}" if run.step is not None else "–"
    best = f"{run.monitor} {run.best:.4g}" if run.best is not None else "–"
    return run.path, run.state, step, best, duration(now - run.changed), size(run.bytes)


def duration(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


if __name__ == "__main__":
    main()
