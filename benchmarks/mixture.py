"""A mixture of experts beside the dense default model: equal active parameters, tokens and
settings, several seeds.

    python -m benchmarks.mixture
        seeds 0, 1 and 2 of each, the default number of steps
    python -m benchmarks.mixture --seeds 3 --steps 200
        another seed, fewer steps
    python -m benchmarks.mixture --out outputs/mixture
        keep the runs; the same command again repeats none that ended

Prints a row per run, the means with their standard deviations, and the mean of the seeds'
differences.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODELS = {"dense": "model=gpt_nano", "mixture": "experiment=mixture"}
METRIC = "val/bits_per_byte"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--steps", type=int, help="optimizer steps of each run; left out: the configuration's"
    )
    parser.add_argument("--out", type=Path, help="folder of the runs; left out: a temporary one")
    args, overrides = parser.parse_known_args()
    steps = [] if args.steps is None else [f"trainer.max_steps={args.steps}"]
    print(
        "| model | seed | held-out bits per byte | minutes |\n| --- | ---: | ---: | ---: |",
        flush=True,
    )
    found: dict[str, list[float]] = {name: [] for name in MODELS}
    with tempfile.TemporaryDirectory() as temporary:
        for seed in args.seeds:
            for name, word in MODELS.items():
                directory = (args.out or Path(temporary)).resolve() / f"{name}{seed}"
                summary = train(directory, [word, f"seed={seed}", *steps, *overrides])
                found[name].append(summary["metrics"][METRIC])
                print(
                    f"| {name} | {seed} | {found[name][-1]:.4f} | {summary['seconds'] / 60:.1f} |",
                    flush=True,
                )
    rows = {
        **found,
        "mixture - dense": [a - b for a, b in zip(found["mixture"], found["dense"], strict=True)],
    }
    for name, values in rows.items():
        spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
        print(f"\n{name}: {statistics.mean(values):.4f}{spread} bits per byte")
    return 0


def train(directory: Path, words: list[str]) -> dict:
    """Run `train.py`, unless the run has ended already, and return its summary.json."""
    place = [f"run.root={directory.parent}", f"run.name={directory.name}"]
    command = [sys.executable, "train.py", *words, *place, "logger=none"]
    summary = directory / "summary.json"
    if (
        not summary.exists() or json.loads(summary.read_text())["stop_reason"] != "finished"
    ):  # else the run resumes
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise SystemExit(
                f"{' '.join(command)} failed:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
            )
    return json.loads(summary.read_text())


if __name__ == "__main__":
    sys.exit(main())
