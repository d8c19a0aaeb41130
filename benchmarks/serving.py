"""Speed of data loading: of memory-mapped tokens, and of loader processes with costly samples.

python -m benchmarks.serving JOB     the loader alone: tokens per second
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.contender import ROOT, environment
from benchmarks.job import CONFIGS, Job, allowed

WORKERS = (0, 1, 2)
STEPS = 60


def served(job: Job, *, seconds: float = 2.0) -> float:
    """Return tokens per second of a run's loader without training: shuffled windows, as int64
    tensors.
    """
    import numpy as np

    from armature.data.base import DataModule
    from armature.data.text import Windows

    assert job.tokens is not None
    tokens = np.memmap(job.tokens[0], job.tokens[1], mode="r")

    class Tokens(DataModule):
        def dataset(self, split: str) -> Windows:
            return Windows(tokens, context=job.context, whole=False)

    data = Tokens(global_batch_size=job.global_batch_size)
    count, end, start = 0, time.perf_counter() + seconds, time.perf_counter()
    while time.perf_counter() < end:
        for batch in data.train_dataloader():
            count += batch["inputs"].numel()
            if time.perf_counter() >= end:
                break
    return count / (time.perf_counter() - start)


def images(
    folder: Path, *, rounds: int, say: Callable[[str], None]
) -> dict[int, list[dict[str, float]]]:
    """Return `samples_per_second` and `data_wait` of short runs of train.py, by number of loader
    processes.
    """
    found: dict[int, list[dict[str, float]]] = {workers: [] for workers in WORKERS}
    for number in range(1, rounds + 1):
        for workers in WORKERS:
            name = f"images-{workers}-{number}"
            command = [
                sys.executable,
                str(ROOT / "train.py"),
                f"hydra.searchpath=[file://{CONFIGS}]",
                "data=images",
                "task=image_classification",
                "model=vit_tiny",
                "model.image_size=32",
                "model.patch_size=4",
                "model.channels=3",
                "model.width=128",
                "optimizer=adamw",
                "trainer.accelerator=cpu",
                "trainer.precision=32-true",
                f"trainer.max_steps={STEPS}",
                "trainer.max_epochs=null",
                "trainer.limit_val_batches=0",
                "trainer.test_at_end=false",
                "checkpoint.at_end=false",
                "logger=none",
                f"data.num_workers={workers}",
                f"run.root={folder / 'runs'}",
                f"run.name={name}",
                allowed("armature", "benchmarks", "torch", "lightning.pytorch"),
            ]
            # one core for the model, the other one for loading
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment() | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:])
            found[workers].append(
                json.loads((folder / "runs" / name / "summary.json").read_text())["timings"]
            )
        shown = ", ".join(
            f"{w}: {rows[-1]['samples_per_second']:.0f}/s" for w, rows in found.items()
        )
        say(f"round {number} of {rounds}, images by loader processes {shown}")
    return found


def serve(job_file: Path) -> dict[str, Any]:
    """Run this module in its own process and return what it prints."""
    command = [sys.executable, "-m", "benchmarks.serving", str(job_file)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    job = Job.load(sys.argv[1])
    print(json.dumps({"tokens_per_second": served(job) if job.tokens is not None else None}))
