"""Measure training on this machine, compared with a bare PyTorch loop and with alternatives.

    python -m benchmarks --quick          five minutes, one table
    python -m benchmarks --trend          earlier results of --quick, and which became slower
    python -m benchmarks                  the default model: one process, and every strategy
    python -m benchmarks model=gpt2_124m data.context=1024 strategy.compile=block
                                          overrides as for train.py
    python -m benchmarks --overhead --startup --loss
                                          overhead per step, time to the first step, the loss
    python -m benchmarks --scale 1,2,4,8 strategy=fsdp
                                          more ranks: weak and strong scaling, and a projection
    python -m benchmarks --all --write    everything, and write the tables of docs/benchmarks.md

All contenders are started once and take turns in blocks of steps, so that disturbances of the
machine affect all alike. Results are medians over the rounds, with quartiles. They are written to
outputs/benchmarks/DATE.json.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from armature.errors import ConfigError
from benchmarks import history, quick, report, sections


def main() -> int:
    args = parse(sys.argv[1:])
    if args.trend:
        return trend()
    say = (
        (lambda line: None)
        if args.quiet
        else (lambda line: print(line, file=sys.stderr, flush=True))
    )
    file = args.out or ROOT / "outputs" / "benchmarks" / f"{time.strftime('%Y-%m-%d-%H%M%S')}.json"
    try:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
            folder = Path(args.keep or temporary)
            if args.quick:
                return quick.run(args, folder, say=say)
            bench = sections.Benchmark(args, folder, say=say)
            results = bench.run(lambda results: report.save(results, file))
    except ConfigError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    print(report.markdown(results))
    print(f"written to {file}", file=sys.stderr)
    problem = report.plot(file, file.with_suffix(".svg"))
    if problem is not None:
        print(problem, file=sys.stderr)
    if args.write:
        report.write(results, file, docs=ROOT / "docs")
        print(f"written to {ROOT / 'docs' / 'benchmarks.md'}", file=sys.stderr)
    failed = [
        record.name
        for section in results["sections"].values()
        for record in section.get("records", ())
        if record.note.startswith("failed")
    ]
    return 1 if failed else 0


def trend() -> int:
    """Print all results of --quick by machine and row.

    Return 1 if the newest of a row is slower than before.
    """
    results, problems = history.read(quick.files())
    print(
        "\n".join(
            [*problems, *history.trend(results)] or ["no results yet. Type make bench ARGS=--quick"]
        )
    )
    return 1 if any(found.slower for found in history.verdicts(results)) else 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "overrides", nargs="*", help="as for train.py; they apply to every contender"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="five minutes, one table; --write adds it to the history",
    )
    parser.add_argument(
        "--trend", action="store_true", help="the history of --quick, and which rows became slower"
    )
    parser.add_argument(
        "--training", action="store_true", help="one process: bare loop, ours, alternatives"
    )
    parser.add_argument(
        "--strategies", action="store_true", help="ours and raw torch on several ranks"
    )
    parser.add_argument(
        "--overhead", action="store_true", help="time that a training loop adds to a step of 130 µs"
    )
    parser.add_argument(
        "--startup", action="store_true", help="from the command to the first optimizer step"
    )
    parser.add_argument(
        "--loss", action="store_true", help="memory and time of a large vocabulary's loss"
    )
    parser.add_argument(
        "--data", action="store_true", help="whether data loading keeps up with training"
    )
    parser.add_argument(
        "--saves", action="store_true", help="a checkpoint of a gigabyte, and the steps after it"
    )
    parser.add_argument(
        "--scale", metavar="N,N,…", help="numbers of ranks; strategy= as for train.py"
    )
    parser.add_argument(
        "--bandwidth",
        type=float,
        default=50.0,
        help="GB/s that a rank can send, for the projection",
    )
    parser.add_argument(
        "--all", action="store_true", help="every section; --scale only if it is given"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WORD",
        help="contenders whose name contains one of these words",
    )
    parser.add_argument(
        "--ranks", type=int, help="for --strategies; default: all GPUs, or two CPU ranks"
    )
    parser.add_argument(
        "--rounds", type=int, help="default: 7; --quick: as many as fit into its time"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a block")
    parser.add_argument(
        "--alone", action="store_true", help="one contender in memory at a time; slower"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the tables to docs/benchmarks.md"
    )
    parser.add_argument(
        "--out", type=Path, help="the JSON file; default: outputs/benchmarks/DATE.json"
    )
    parser.add_argument(
        "--keep", metavar="FOLDER", help="keep run directories and logs here; default: delete them"
    )
    parser.add_argument("--quiet", action="store_true", help="no lines of progress")
    args = parser.parse_args(arguments)
    if taken := [word for word in args.only or () if "=" in word]:
        parser.error(f"--only takes every word after it. Type {' '.join(taken)} before it")
    args.rounds = args.rounds or (None if args.quick else 7)
    if args.quick and (
        unused := [name for name in ("alone", "out", "ranks", "scale") if getattr(args, name)]
    ):
        parser.error(f"--quick is one fixed comparison. Leave out --{unused[0]}")
    chosen = [name for name in sections.NAMES if getattr(args, name)]
    args.sections = (
        list(sections.NAMES)
        if args.all
        else chosen or ([] if args.scale else ["training", "strategies"])
    )
    try:
        args.scale = [int(n) for n in args.scale.split(",")] if args.scale else []
    except ValueError:
        parser.error(f"--scale {args.scale}: type numbers of ranks, as in --scale 1,2,4")
    return args


if __name__ == "__main__":
    sys.exit(main())
