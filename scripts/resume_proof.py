"""Test whether your experiment resumes after a stop exactly as if it had not been stopped.

python scripts/resume_proof.py experiment=mine
python scripts/resume_proof.py --steps 20 --at 7,13 experiment=mine strategy=ddp trainer.devices=2

It trains the experiment for a few steps without a stop. Then it trains again in another run
directory, sends SIGTERM, resumes, sends SIGKILL, and resumes again. metrics.csv, weights, optimizer
state and random state must be equal bit for bit. The first difference is printed with its possible
causes.
"""

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

OURS = ("run.name", "run.root", "logger")  # set by this script; its runs use no logger
CAUSES = """\
Possible causes:
  - A value that your code keeps between steps but not in checkpoints. In a LightningModule use register_buffer, or
    on_save_checkpoint and on_load_checkpoint. In a callback or data module use state_dict and load_state_dict.
  - Random numbers from your own generator, such as numpy.random.default_rng() or torch.Generator(). Use the generators
    of random, numpy.random or torch, whose state is saved; or, in a data set, `augment(sample, generator)`.
  - Work done at the start of each process: in __init__, setup, on_fit_start or on_train_start, which run again.
  - Data that change, or a data set whose length or order differs between starts (a set, os.listdir)."""
UNSTABLE = """\
The stop is not the cause: two runs without a stop differ too, {difference}.
Causes are GPU kernels that sum in a different order each time, or a seed taken from the clock. Type
trainer.deterministic=true, which raises an error that names such kernels."""


@dataclass(frozen=True)
class Difference:
    """First difference of two runs: its description, and the step if it is known."""

    text: str
    step: int | None = None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of the short run (8)")
    parser.add_argument(
        "--at",
        help="the steps to stop at: SIGTERM at the first, SIGKILL at the second (the middle)",
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the run directories even if all is equal"
    )
    parser.add_argument(
        "--config-dir", help="a folder with your own configurations, as for train.py"
    )
    args, overrides = parser.parse_known_args()
    wrong = [o for o in overrides if o.startswith("-") or "=" not in o]
    if wrong:
        parser.error(f"{' '.join(wrong)}: type KEY=VALUE, as for train.py")
    if args.config_dir is not None and not os.path.isdir(args.config_dir):
        parser.error(f"--config-dir {args.config_dir}: there is no such folder")
    stops = stop_steps(args.at, args.steps, parser)
    root = Path("outputs") / time.strftime("resume-proof-%Y%m%d-%H%M%S")
    try:
        folder = ["--config-dir", args.config_dir] if args.config_dir else []
        equal = prove(root, overrides, folder, steps=args.steps, stops=stops)
    except KeyboardInterrupt:
        print(f"Stopped. The runs so far are in {root}.", file=sys.stderr)
        sys.exit(130)
    if equal and not args.keep:
        shutil.rmtree(root)
    else:
        print(f"the runs: {root}/straight and {root}/stopped; their output: {root}/*.log")
    sys.exit(0 if equal else 1)


def stop_steps(typed: str | None, steps: int, parser: argparse.ArgumentParser) -> dict[str, int]:
    """Return the step of each signal."""
    if steps < 3:
        parser.error(f"--steps {steps}: at least 3 steps are needed to stop twice and resume")
    if typed is None:
        at = [steps // 2, min(max(steps * 3 // 4, steps // 2 + 1), steps - 1)]
    elif re.fullmatch(r"\d+(,\d+)?", typed):
        at = [int(step) for step in typed.split(",")]
    else:
        parser.error(f"--at {typed}: type one step or two, as in --at 3 or --at 3,5")
    if not 0 < at[0] < at[-1] + len(at) % 2 <= steps - 1 + len(at) % 2:
        parser.error(
            f"--at {typed}: steps must rise and lie between 1 and {steps - 1} (--steps {steps})"
        )
    return dict(zip(("SIGTERM", "SIGKILL"), at, strict=False))


def prove(
    root: Path, overrides: list[str], options: list[str], *, steps: int, stops: dict[str, int]
) -> bool:
    """Make the runs, compare them and print the result; return whether they are equal."""
    validates = val_every_n_steps(stops["SIGTERM"])
    short = [o for o in overrides if o.lstrip("+~").split("=")[0].split(".")[0] != "logger"]
    short = [o for o in short if o.split("=")[0] not in OURS]
    ours = [
        f"run.root={root}",
        "logger=none",
        f"trainer.max_steps={steps}",
        "trainer.max_epochs=null",
        "trainer.test_at_end=false",
        f"trainer.val_every_n_steps={validates}",
        "trainer.limit_val_batches=2",
        "launch.max_restarts=0",
        "checkpoint.root=null",
    ]
    keys = {each.partition("=")[0] for each in ours}
    if replaced := [
        o for o in overrides if o not in short or o.lstrip("+").partition("=")[0] in keys
    ]:
        print(
            f"{', '.join(replaced)}: not used, since this script decides that (--steps {steps}: "
            "the run's length)"
        )
    short = [*options, *short, *ours]
    signals = ",".join(f"{name}:{step}" for name, step in stops.items())
    stopped = [
        *short,
        f"+callbacks.stop_at={{_target_:armature.callbacks.stop_at.StopAt,signals:{{{signals}}}}}",
    ]
    print(f"a run of {steps} steps in {root}; validation every {validates} steps and at the end")
    train(root, "straight", short, what="without a stop")
    for name, step in stops.items():
        train(root, "stopped", stopped, what=f"{name} at step {step}", stop=step)
    train(root, "stopped", stopped, what="resumed to the end")
    difference, counts = compare(root / "straight", root / "stopped")
    if difference is None:
        print(f"equal, bit for bit: {counts}")
        return True
    print(f"\nNOT equal: {difference.text}")
    print("  straight = the run without a stop, resumed = the one that was stopped")
    train(root, "again", short, what="without a stop, again")
    itself, _ = compare(root / "straight", root / "again")
    print(CAUSES if itself is None else UNSTABLE.format(difference=itself.text))
    return False


def val_every_n_steps(stop: int) -> int:
    """Return an interval so that one validation ends before the stop and, if it can be, another one
    is due at it.
    """
    return next((stop // parts for parts in range(2, stop) if stop % parts == 0), max(stop - 1, 1))


def train(
    root: Path, name: str, overrides: list[str], *, what: str, stop: int | None = None
) -> None:
    """Start train.py once.

    Its output goes to a file and is shown if the run ends in an unexpected way.

    Args:
        stop: the step at which it signals itself.
    """
    started = time.monotonic()
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{name}.log").open("a+") as log:
        begin = log.tell()
        command = [sys.executable, str(ROOT / "train.py"), *overrides, f"run.name={name}"]
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        log.seek(begin)
        output = log.read()
    print(f"  {name:<9} {what:<22} {time.monotonic() - started:5.1f} s", flush=True)
    signaled = stop is not None and (root / name / f".stopped-at-{stop}").exists()
    if (code == 0) == (stop is not None) or code == 2 or (code and not signaled):
        was = (
            f"finished before its stop at step {stop}"
            if code == 0
            else f"ended with exit code {code}"
        )
        print(f"\nThe run {was}. Its last lines:\n", file=sys.stderr)
        print("\n".join(output.splitlines()[-40:]), file=sys.stderr)
        if code == 2 and not (root / name).exists():
            shutil.rmtree(root)
        sys.exit(code or 1)


def compare(straight: Path, resumed: Path) -> tuple[Difference | None, str]:
    """Return the first difference or None, and a description of what was compared."""
    found = compare_rows(read(straight / "metrics.csv"), read(resumed / "metrics.csv"))
    columns, rows = read(straight / "metrics.csv")
    if found is not None:
        return found, ""
    found, counts = compare_checkpoints(straight, resumed)
    return found, f"{len(rows)} rows × {len(columns)} columns of metrics.csv, {counts}"


def read(file: Path) -> tuple[list[str], list[dict[str, str]]]:
    with file.open(newline="") as stream:
        reader = csv.DictReader(stream)
        rows = list(reader)
        return list(reader.fieldnames or []), rows


def compare_rows(
    straight: tuple[list[str], list[dict]], resumed: tuple[list[str], list[dict]]
) -> Difference | None:
    """Return the first missing or repeated step, else the first differing value, else differing
    columns, else None.
    """
    (columns, rows), (other_columns, others) = straight, resumed
    steps, other_steps = [row["step"] for row in rows], [row["step"] for row in others]
    for step in dict.fromkeys([*steps, *other_steps]):
        there, here = steps.count(step), other_steps.count(step)
        if there != here:
            text = (
                f"metrics.csv has {_times(there)} of step {step} straight, {_times(here)} resumed"
            )
            return Difference(text, int(step))
    for row, other in zip(rows, others, strict=True):
        for column in dict.fromkeys([*columns, *other_columns]):
            value, its = row.get(column), other.get(column)
            if value != its:
                text = (
                    f"step {row['step']}, {column}: {value or 'nothing'} straight, "
                    f"{its or 'nothing'} resumed"
                )
                return Difference(text, int(row["step"]))
    if columns != other_columns:
        return Difference(
            f"columns of metrics.csv: {', '.join(columns)} straight, {', '.join(other_columns)} "
            "resumed"
        )
    return None


def _times(count: int) -> str:
    return {0: "no row", 1: "one row"}.get(count, f"{count} rows")


def compare_checkpoints(straight: Path, resumed: Path) -> tuple[Difference | None, str]:
    """Compare weights, optimizer state, the state of callbacks and of random number generators."""
    import torch

    from armature.checkpoint import resume, storage
    from armature.checkpoint import state as checkpoint

    paths = [resume.last_checkpoint(run) for run in (straight, resumed)]
    if None in paths:
        return Difference("one of the runs has no checkpoint at its end"), ""
    contents: list[dict[str, Any]] = []
    for path in paths:
        assert path is not None
        saved = storage.read_metadata(path).state_dict_metadata
        contents.append(checkpoint.load_tensors(path, saved, saved))
    one, other = contents
    if one.keys() != other.keys():
        return Difference(
            f"the checkpoints hold different tensors: {sorted(one.keys() ^ other.keys())[:5]}"
        ), ""
    weights = [name for name in one if not name.startswith(checkpoint.RESERVED)]
    for name in [*weights, *(name for name in one if name not in weights)]:
        value, its = one[name], other[name]
        if isinstance(value, torch.Tensor):
            differs = (value != its) & ~((value != value) & (its != its))  # a NaN equals a NaN here
            if differs.any():
                i = int(differs.flatten().nonzero()[0])
                a, b = value.flatten()[i].item(), its.flatten()[i].item()
                text = (
                    f"{name} at the end: {int(differs.sum())} of {value.numel()} elements, "
                    f"{a!r} straight, {b!r}"
                )
                return Difference(f"{text} resumed"), ""
        elif value != its:
            return Difference(f"{name} at the end: {value} straight, {its} resumed"), ""
    metas = [storage.read_meta(path) for path in paths if path is not None]
    found = compare_state(
        [
            {k: m.get(k) for k in (checkpoint.RANDOM, "lr_schedulers", checkpoint.GROUPS)}
            for m in metas
        ]
    )
    counts = (
        f"{len(weights)} tensors of weights, {len(one) - len(weights)} of optimizer and "
        "average, random state"
    )
    return found, counts


def compare_state(states: list[Any], path: str = "") -> Difference | None:
    """Return the first place at which two trees of plain values and tensors differ, or None."""
    import torch

    one, other = states
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        items = [(f"{path}.{key}".lstrip("."), [one[key], other[key]]) for key in one]
    elif (
        isinstance(one, (list, tuple))
        and isinstance(other, (list, tuple))
        and len(one) == len(other)
    ):
        items = [(f"{path}[{i}]", [a, b]) for i, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            same = torch.equal(one, other)
        else:
            same = bool(one == other)
        if same:
            return None
        if path.startswith("random"):
            kind = next(
                (kind for kind in ("python", "numpy", "torch", "cuda") if f".{kind}" in path), ""
            )
            return Difference(
                f"the state of {kind}'s random numbers at the end: different numbers were drawn"
            )
        return Difference(f"{path} at the end: {one} straight, {other} resumed")
    return next(
        (found for name, pair in items if (found := compare_state(pair, name)) is not None), None
    )


if __name__ == "__main__":
    main()
