"""Measure training on this machine, compared with a bare PyTorch loop and with alternatives.

    python -m benchmarks --quick          five minutes, one table
    python -m benchmarks                  the same with more rounds
    python -m benchmarks model=gpt2_124m data.context=1024 strategy.compile=block
                                          overrides as for train.py

All contenders are started once and take turns in blocks of steps, so that disturbances of the
machine affect all alike. Results are medians over the rounds, with quartiles.
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from armature.errors import ConfigError
from benchmarks import quick

ROUNDS = 12


def main() -> int:
    args = parse(sys.argv[1:])
    say = (
        (lambda line: None)
        if args.quiet
        else (lambda line: print(line, file=sys.stderr, flush=True))
    )
    try:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
            return quick.run(args, Path(args.keep or temporary), say=say)
    except ConfigError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "overrides", nargs="*", help="as for train.py; they apply to every contender"
    )
    parser.add_argument(
        "--quick", action="store_true", help="as many rounds as fit into five minutes"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WORD",
        help="contenders whose name contains one of these words",
    )
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a block")
    parser.add_argument(
        "--keep", metavar="FOLDER", help="keep run directories and logs here; default: delete them"
    )
    parser.add_argument("--quiet", action="store_true", help="no lines of progress")
    args = parser.parse_args(arguments)
    if taken := [word for word in args.only or () if "=" in word]:
        parser.error(f"--only takes every word after it. Type {' '.join(taken)} before it")
    args.rounds = args.rounds or (None if args.quick else ROUNDS)
    return args


if __name__ == "__main__":
    sys.exit(main())
