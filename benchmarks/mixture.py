"""A mixture of experts beside the dense default model: equal active parameters, tokens and settings, several seeds.

    python -m benchmarks.mixture                 three seeds of each, the default number of steps
    python -m benchmarks.mixture --steps 200     fewer steps

Prints a row per run, and the means with their spread. Run it on a quiet machine: it takes six default runs.
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="optimizer steps of each run; left out: the configuration's")
    args, overrides = parser.parse_known_args()
    steps = [] if args.steps is None else [f"trainer.max_steps={args.steps}"]
    print("| model | seed | held-out bits per byte | minutes |\n| --- | ---: | ---: | ---: |")
    found: dict[str, list[float]] = {name: [] for name in MODELS}
    with tempfile.TemporaryDirectory() as root:
        for seed in range(args.seeds):
            for name, word in MODELS.items():
                summary = train(Path(root), f"{name}{seed}", [word, f"seed={seed}", *steps, *overrides])
                found[name].append(summary["metrics"][METRIC])
                minutes = summary["seconds"] / 60
                print(f"| {name} | {seed} | {found[name][-1]:.4f} | {minutes:.1f} |", flush=True)
    for name, values in found.items():
        spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
        print(f"\n{name}: {statistics.mean(values):.4f}{spread} bits per byte")
    return 0


def train(root: Path, name: str, words: list[str]) -> dict:
    """Run `train.py` and return its summary.json."""
    command = [sys.executable, "train.py", *words, f"run.root={root}", f"run.name={name}", "logger=none"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr[-4000:]}")
    return json.loads((root / name / "summary.json").read_text())


if __name__ == "__main__":
    sys.exit(main())
