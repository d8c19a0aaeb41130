"""Write report.html of a run again: of a run that was killed, of an older one, or with
run.report=false.

python scripts/report.py outputs/mine
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from armature import cli, files
from armature.launcher import lock, run_state
from armature.pages import history, report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    args = parser.parse_args()
    if problems := history.not_runs(args.runs):
        cli.refuse(problems)
    for path in args.runs:
        if reason := files.why_not_writable(path / report.NAME):
            cli.refuse(
                [
                    f"{path / report.NAME}: it cannot be written ({reason}). Copy the run to where "
                    "you may write."
                ]
            )
        cli.write_output(
            "", path / report.NAME, report.make(path, running=run_state.is_held(path / lock.NAME))
        )
        print(path / report.NAME)


if __name__ == "__main__":
    main()
