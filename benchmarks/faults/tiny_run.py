"""A tiny language model on a small corpus, which trains in seconds: its overrides, environment and
results.
"""

import json
import os
import time
from pathlib import Path

from armature.training.metrics_csv import read

ROOT = Path(__file__).parents[2]
TINY = [
    "data=text",
    "data.source.vocab_size=300",
    "data.context=16",
    "data.global_batch_size=8",
    "data.micro_batch_size=auto",
    "model=gpt_nano",
    "model.width=32",
    "model.layers=2",
    "model.heads=2",
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "trainer.max_steps=6",
    "trainer.max_epochs=null",
    "trainer.val_every_n_steps=3",
    "trainer.limit_val_batches=2",
    "trainer.limit_test_batches=2",
    "trainer.log_every_n_steps=2",
    "logger=none",
    "task.preview_tokens=8",
]


def write_corpus(folder: Path, files: int = 12) -> Path:
    """Write some text with a pattern to learn; return its glob."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(files):
        lines = [
            f"line {j} of file {i}: the quick brown fox counts {j * i} and jumps.\n"
            for j in range(60)
        ]
        (folder / f"{i:02d}.txt").write_text("".join(lines))
    return folder / "*.txt"


def environment(**extra: str) -> dict[str, str]:
    """Return the variables of this process without those of schedulers, launchers and trackers, and
    with `extra`.
    """
    outside = ("SLURM_", "WANDB_", "TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **extra}


def wait_for(condition, *, seconds: float, what: str) -> None:
    """Raise an AssertionError that names `what` unless the condition becomes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s: {what}")


def rows(run_dir: Path) -> list[dict[str, str]]:
    return read(run_dir / "metrics.csv")[1]


def losses(run_dir: Path) -> list[float]:
    return [float(row["train/loss"]) for row in rows(run_dir)]


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())
