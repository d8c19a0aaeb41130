"""Train one tiny model in fp32 under every layout on this machine's CPU, and compare each with one
process.

    python -m benchmarks.parity
        every layout
    python -m benchmarks.parity --resume same
        also resume checkpoints of each layout under the same one
    python -m benchmarks.parity --resume
        also under every other
    python -m benchmarks.parity --resume distinct
        without layouts whose ranks hold the same as another's
    python -m benchmarks.parity --only fsdp tensor
        layouts whose name contains one of these words

Twelve optimizer steps of AdamW, with clipping and accumulation. The results are the largest
relative differences of any step's loss and gradient norm, and of the final weights. The exit code
is 1 if one is above the tolerance, or if a resume under the same layout does not repeat every bit.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from benchmarks.parity import context, mixtures
from benchmarks.parity.harness import LAYOUTS as DENSE
from benchmarks.parity.harness import Job, alone, difference, fit, fit_once, repeats

LAYOUTS = {**DENSE, **context.LAYOUTS}
TOLERANCE = 1e-5
# ranks hold the same as in another layout: checkpoints do not depend on schedules and times of
# reduction
ALIKE = (
    "single, micro-batch 4",
    "fsdp 2, ZeRO-2",
    "fsdp 2, reduced once a step",
    "tensor 2",
    "pipeline 2, gpipe",
    "fsdp 2 × pipeline 2",
    "deepspeed 2 at 2",
    "context 2, ZeRO-2",
    "context 2, recomputed",
    "context 2, compiled blocks",
    "context 2 × tensor 2",
    "context 2 × pipeline 2, gpipe",
    "context 2 × pipeline 2, interleaved 1f1b",
    "mixture, single, micro-batch 4",
    "mixture, fsdp 2, expert 2, recomputed",
    "mixture, fsdp 2, expert 2, ZeRO-2",
    "mixture, fsdp 2 × pipeline 2, expert 2",
    "mixture, fsdp 2 × pipeline 2, expert 2, interleaved, recomputed",
)
CHECKPOINTS = ("all", "distinct", "same")
QUANTITIES = ("loss", "grad_norm", "weights")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="layouts whose name contains one of these words"
    )
    parser.add_argument(
        "--resume", nargs="?", const="all", choices=CHECKPOINTS, help="checkpoints too"
    )
    parser.add_argument("--no-train", action="store_true", help="compare only checkpoints")
    args = parser.parse_args()
    if args.no_train and args.resume in (None, "same"):
        parser.error(
            "--no-train leaves nothing to compare: type --resume, or --resume distinct, with it"
        )
    every = LAYOUTS | mixtures.LAYOUTS
    chosen = {
        n: job
        for n, job in every.items()
        if args.only is None or any(word in n for word in args.only)
    }
    if not chosen:
        parser.error(
            f"--only {' '.join(args.only or [])}: no such layout. Layouts: {'; '.join(every)}"
        )
    worst = 0.0 if args.no_train else train_all(chosen, resume=args.resume is not None)
    if args.resume == "distinct":
        chosen = {name: job for name, job in chosen.items() if name not in ALIKE}
    references = (
        ()
        if args.resume in (None, "same")
        else (LAYOUTS["single"], mixtures.LAYOUTS["mixture, single"])
    )
    for first in references:
        alike = {
            name: job for name, job in chosen.items() if alone(job) == alone(first)
        }  # the same data and model
        with tempfile.TemporaryDirectory() as folder:
            worst = max(worst, resume_all(alike, Path(folder)) if alike else 0.0)
    if worst == math.inf:
        print("\na resume under the same layout did not repeat every bit")
    else:
        print(f"\nlargest difference {worst:.1e}, tolerance {TOLERANCE:.0e}")
    return 0 if worst <= TOLERANCE else 1


def train_all(layouts: dict[str, Job], *, resume: bool) -> float:
    """Print a row per layout; return the largest difference.

    With `resume`, each is also resumed in the middle.
    """
    bits = " same bits resumed |" if resume else ""
    print(
        f"| layout | processes | loss | gradient norm | final weights | elements per rank |{bits} "
        "seconds |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: |" + (" :---: |" if resume else "") + " ---: |")
    worst = 0.0
    for name, job in layouts.items():
        reference = fit_once(alone(job))
        start = time.monotonic()
        run = fit(job)
        far = difference(run, reference)
        worst = max(worst, *far.values())
        values = " | ".join(f"{far[quantity]:.1e}" for quantity in QUANTITIES)
        seconds = time.monotonic() - start
        same = repeats(job, run) if resume else True
        worst = worst if same else math.inf
        bits = f" {'yes' if same else 'no'} |" if resume else ""
        elements = run.facts["elements"]
        print(
            f"| {name} | {job.ranks} | {values} | {elements:,} |{bits} {seconds:.1f} |", flush=True
        )
    return worst


def resume_all(layouts: dict[str, Job], folder: Path) -> float:
    """Save in the middle under each row and resume under each column; cells hold the largest
    difference.
    """
    print("\n| saved under ↓, resumed under → | " + " | ".join(layouts) + " |")
    print("| --- |" + " ---: |" * len(layouts))
    worst, reference = 0.0, fit_once(alone(next(iter(layouts.values()))))
    for i, (name, job) in enumerate(layouts.items()):
        saved = str(folder / str(i))
        fit(replace(job, steps=job.steps // 2, save=saved))
        cells = [
            max(difference(fit(replace(other, resume=saved)), reference).values())
            for other in layouts.values()
        ]
        worst = max(worst, *cells)
        print(f"| {name} | " + " | ".join(f"{cell:.0e}" for cell in cells) + " |", flush=True)
    return worst


if __name__ == "__main__":
    sys.exit(main())
