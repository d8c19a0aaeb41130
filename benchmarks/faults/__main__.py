"""Break runs in every listed way, under every strategy, and report how they end.

    python -m benchmarks.faults            the whole table
    python -m benchmarks.faults --only sigkill_rank,hang --strategy ddp,fsdp
    python -m benchmarks.faults --parts FILE --strategy ddp
                                           in parts: FILE collects the cells of one table
    python -m benchmarks.faults --kills 40 --sigterms 60 --layouts
                                           random moments and other numbers of ranks

The exit code is 1 if a cell of ours fails. A stock Lightning script is shown for comparison and not
judged.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.faults import matrix as local
from benchmarks.faults import over_network, report, trials, under_slurm
from benchmarks.faults.cells import COLUMNS, Column, Session
from benchmarks.faults.matrix import Cell, Fault, cell

FAULTS = (*local.FAULTS, *under_slurm.FAULTS, *over_network.FAULTS)


def names(known: list[str]):
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(
                f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}"
            )
        return chosen

    return parse


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", type=names([fault.name for fault in FAULTS]), metavar="FAULT,…", help="these rows"
    )
    parser.add_argument(
        "--strategy", type=names(list(COLUMNS)), metavar="STRATEGY,…", help="these columns"
    )
    parser.add_argument(
        "--kills", type=int, metavar="N", help="SIGKILL one process at N random moments"
    )
    parser.add_argument(
        "--sigterms", type=int, metavar="N", help="SIGTERM to a random rank at N random moments"
    )
    parser.add_argument("--layouts", action="store_true", help="resume on other numbers of ranks")
    parser.add_argument("--seed", type=int, default=None, help="of the random moments")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time")
    parser.add_argument(
        "--parts", type=Path, metavar="FILE", help="collect cells here, for a table in parts"
    )
    parser.add_argument(
        "--tail", type=int, default=1500, help="characters of a failed cell's output to show"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="run here and keep all files")
    args = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs ignore Ctrl-C otherwise
    folder = args.keep or Path(tempfile.mkdtemp(prefix="faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    session = Session(folder)
    others = args.kills or args.sigterms or args.layouts
    try:
        ended_well = random_moments(args, session) if others else matrix(args, session)
        return 0 if ended_well else 1
    finally:
        if args.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def random_moments(args: argparse.Namespace, session: Session) -> bool:
    """Run the chosen ones of kills, signals and layouts, and search their files for secrets."""
    seed = random.randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    asked = {
        "kills": args.kills
        and (lambda: trials.kills(session, args.kills, seed=seed, jobs=args.jobs)),
        "sigterms": args.sigterms
        and (lambda: trials.sigterms(session, args.sigterms, seed=seed, jobs=args.jobs)),
        "layouts": args.layouts and (lambda: trials.layouts(session)),
        "secrets": lambda: trials.with_secret(session),
    }
    ended_well = True
    for make in asked.values():
        if not make:
            continue
        started = time.monotonic()
        summary = make()
        seconds = time.monotonic() - started
        print("\n".join(["", report.heading(seconds), *summary.problems, str(summary)]), flush=True)
        ended_well = ended_well and not summary.problems
    return ended_well


def matrix(args: argparse.Namespace, session: Session) -> bool:
    """Run and print the table; return whether every cell of ours held."""
    faults = [fault for fault in FAULTS if args.only is None or fault.name in args.only]
    columns = [
        column for name, column in COLUMNS.items() if args.strategy is None or name in args.strategy
    ]
    started, lock, done = time.monotonic(), threading.Lock(), []

    def one(pair: tuple[Fault, Column]) -> Cell:
        result = cell(*pair, session)
        with lock:
            done.append(result)
            if args.parts is not None:
                report.keep(args.parts, result)
            print(
                f"{len(done):4} {result.seconds:6.1f} s  {result.fault:20} {result.column:14} "
                f"{result.text}",
                flush=True,
            )
            if not result.ok and not COLUMNS[result.column].stock:
                print(textwrap.indent(result.output[-args.tail :], "     | "), flush=True)
        return result

    # cells that wait for a scheduler or a cable have their own threads and run beside the others
    lanes = {"": args.jobs, "slurm": 2, "network": 1}
    with ExitStack() as stack:
        stack.callback(under_slurm.SLURM.close)
        pools = {
            name: stack.enter_context(ThreadPoolExecutor(threads))
            for name, threads in lanes.items()
        }
        futures = [
            pools[fault.lane].submit(one, (fault, column)) for fault in faults for column in columns
        ]
        try:
            cells = [future.result() for future in futures]
        except (
            BaseException
        ):  # mainly Ctrl-C: running cells still remove their mounts and network namespaces
            for future in futures:
                future.cancel()
            session.end()
            raise
    seconds = time.monotonic() - started
    if args.parts is not None:
        kept = report.kept(args.parts)
        known = {key for cell in kept for key in (cell.fault, cell.column)}
        faults, columns = (
            [f for f in FAULTS if f.name in known],
            [c for n, c in COLUMNS.items() if n in known],
        )
        cells = kept
    table, secret = report.table(cells, faults, columns), trials.with_secret(session)
    ours = [result for result in cells if not COLUMNS[result.column].stock]
    held = sum(result.ok for result in ours)
    print(
        f"\n{report.heading(seconds)}\n\n{table}\n\n{secret}\n\n"
        f"{held} of {len(ours)} cells of ours held"
    )
    return held == len(ours) and not secret.problems


if __name__ == "__main__":
    sys.exit(main())
