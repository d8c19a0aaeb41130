"""Start train.py for tests, on a tiny model and a small corpus, and read what it wrote."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import psutil

from armature import hardware
from armature.training.metrics_csv import read
from tests import forked
from tests.forked import PYTHONPATH as PYTHONPATH
from tests.forked import ROOT

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
    outside = (
        "SLURM_", "WANDB_", "TORCHELASTIC", "TORCHINDUCTOR",
        "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_",
    )  # fmt: skip
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


def meet_a_full_disk(*args: object, **kwargs: object) -> NoReturn:
    """In place of a function that writes."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def rows(run_dir: Path) -> list[dict[str, str]]:
    return read(run_dir / "metrics.csv")[1]


def losses(run_dir: Path) -> list[float]:
    return [float(row["train/loss"]) for row in rows(run_dir)]


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def command(*overrides: str, corpus: Path, launcher: list[str] | None = None) -> list[str]:
    return [
        *(launcher or [sys.executable, str(ROOT / "train.py")]),
        *TINY,
        f"data.path={corpus}",
        *overrides,
    ]


def train(
    *overrides: str,
    cwd: Path,
    corpus: Path,
    launcher: list[str] | None = None,
    ranks: int | None = None,
    timeout: float = 240,
    code: int | None = 0,
    fork: bool = True,
    **extra: str,
) -> subprocess.CompletedProcess[str]:
    """Run train.py to its end; where it trains in its own process, as a fork that has its imports,
    if `fork`.

    Args:
        code: the exit code that it must have; None: any.
        ranks: train with so many ranks, which are forks too: where the agent that starts ranks is
            not the subject.
    """
    if ranks is not None:
        overrides = (*overrides, f"trainer.devices={ranks}")
    words, env = command(*overrides, corpus=corpus, launcher=launcher), environment(**extra)
    starts_ranks = launcher is not None or any(
        word.startswith("trainer.devices=") for word in overrides
    )
    fork = fork and (ranks is not None or not starts_ranks)
    result = run(words, cwd=cwd, env=env, timeout=timeout, ranks=ranks or 1, fork=fork)
    assert code in (None, result.returncode), result.stderr[-6000:]
    return result


def run(
    words: list[str],
    *,
    cwd: Path,
    env: dict[str, str],
    timeout: float = 240,
    ranks: int = 1,
    fork: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a Python script of ours to its end, as forks that have its imports, if `fork`."""
    if fork and not hardware.gpu_count():  # CUDA does not outlive a fork
        return forked.shared().run(words, cwd=cwd, env=env, timeout=timeout, ranks=ranks)
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


def call(file: str | Path, *words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a Python script of ours, such as train.py, as `python` does, but as forks."""
    return python(ROOT / file, *words, fork=True, **options)


def python(
    *words: str | Path,
    cwd: Path = ROOT,
    code: int | None = 0,
    timeout: float = 240,
    ranks: int = 1,
    fork: bool = False,
    **extra: str,
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end.

    Args:
        code: the exit code that it must have; None: any.
    """
    command, env = [sys.executable, *map(str, words)], environment(**extra)
    result = run(command, cwd=cwd, env=env, timeout=timeout, ranks=ranks, fork=fork)
    assert code in (None, result.returncode), result.stdout[-2000:] + result.stderr[-6000:]
    return result


def script(name: str, *arguments: str, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/NAME to its end, without an error."""
    return call(f"scripts/{name}", *arguments, cwd=cwd, **extra)


def start(
    *overrides: str, cwd: Path, corpus: Path
) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Start train.py; return it, and it and all its processes once it has made a step."""
    process = subprocess.Popen(
        command(*overrides, corpus=corpus),
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGHUP, signal.SIG_DFL
        ),  # the tests may run under nohup
    )
    metrics = cwd / "outputs" / "run" / "metrics.csv"
    wait_for(
        lambda: metrics.exists() or process.poll() is not None, seconds=120, what="the first row"
    )
    parent = psutil.Process(process.pid)
    return process, [parent, *parent.children(recursive=True)]


def alive(members: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in members if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
