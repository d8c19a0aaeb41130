"""Compare runs: results with the best in bold, curves over each other, and where their
configurations differ.

python scripts/compare.py outputs/a outputs/b                prints a table and writes compare.html
python scripts/compare.py outputs/rates/* out=rates.html     the trials of a sweep
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from armature import cli
from armature.launcher.streams import make_lasting
from armature.pages import compare, history


def main() -> None:
    make_lasting()  # `| head` ends no command before its page is written
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", help="two or more run directories")
    parser.add_argument("--out", type=Path, help="the page to write (or out=FILE)")
    args = parser.parse_intermixed_args()  # out=FILE may follow an option
    words, out = cli.out_file(args.runs, args.out)
    out, named = out or Path("compare.html"), [Path(word) for word in words]
    folders = {path.parent for path in named if os.path.isdir(path)}
    # a sweep's outputs/rates/* also names its trials.csv and report.html
    paths = [path for path in named if not (os.path.isfile(path) and path.parent in folders)]
    problems = history.not_runs(paths)
    if len(paths) < 2:
        problems.append(
            f"{len(paths)} run: name at least two, as in scripts/compare.py outputs/a outputs/b."
        )
    problems += cli.output_problems("out=", out, ".html")
    if problems:
        cli.refuse(problems)
    runs = [history.read(path) for path in paths]
    print(compare.text(runs))
    cli.write_output("out=", out, compare.make(runs))
    print(out)


if __name__ == "__main__":
    main()
