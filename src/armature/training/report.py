"""The line at the start of a run, summary.json, and the last lines on the screen."""

from __future__ import annotations

import math
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig

from armature import project, run_dir
from armature.checkpoint import directory, resume
from armature.data.batching import Batches
from armature.data.tokenizer import TOKENIZER_FILE
from armature.finetune.folder import CHAT_TEMPLATE
from armature.strategies.base import StrategyMixin
from armature.training.errors import peak_bytes
from armature.training.not_finite import FILE
from armature.training.progress import completed_batches, feed_of

if TYPE_CHECKING:
    from armature.worker import Run


def start_line(
    cfg: DictConfig, batches: Batches, checkpoint: Path | None, trainer: L.Trainer
) -> str:
    """Return one line about layout, devices, precision and batch sizes."""
    ranks = trainer.world_size
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else None
    where = (
        f"{ranks} {cfg.trainer.accelerator} "
        f"rank{'s' * (ranks > 1)}{f' ({backend})' if backend else ''}"
    )
    machines = f" on {cfg.trainer.num_nodes} machines" if cfg.trainer.num_nodes > 1 else ""
    strategy = StrategyMixin.of(trainer)
    count, trained = strategy.parameter_count, strategy.trained_count
    parameters = f"{count:,} parameters"
    if trained != count:
        parameters = f"{trained:,} of {parameters} are trained"
    line = (
        f"{strategy.layout} · {where}{machines} · {cfg.trainer.precision} · "
        f"{type(trainer.optimizers[0]).__name__ if trainer.optimizers else 'no optimizer'} · "
        f"batch {batches.global_batch_size} = {batches.micro_batch_size} micro × "
        f"{batches.accumulate} accumulation × "
        f"{batches.data_ranks} data rank{'s' * (batches.data_ranks > 1)}"
        f"{feed_of(trainer).batch_note} · {parameters} · {cfg.run.dir}"
    )
    if note := getattr(trainer.lightning_module, "start_note", ""):
        line += f"\n{note}"
    if bubble := strategy.bubble_share:
        line += f"\nthe pipeline schedule leaves each rank idle for {bubble:.0%} of a step"
    return (
        line
        if checkpoint is None
        else f"{line}\nresuming from {checkpoint}, step {completed_batches(trainer)}"
    )


def summarize(
    run: Run, *, reason: str, metrics: dict[str, float], seconds: float
) -> dict[str, Any]:
    """Return the contents of summary.json."""
    trainer, log, strategy = run.trainer, run.step_log, StrategyMixin.of(run.trainer)
    timings, best = log.summary(), run.checkpointing.best
    summary: dict[str, Any] = {
        "stop_reason": reason,
        "global_step": completed_batches(trainer),
        "epochs": log.samples_seen / run.feed.train_size,
        "samples": log.samples_seen,
        "planned_steps": run.limits.global_batches,
        "samples_per_epoch": run.feed.train_size,
        "global_batch_size": run.feed.global_batch_size,
        "skipped_steps": run.guard.skipped,
        "metrics": {n: value if math.isfinite(value) else None for n, value in metrics.items()},
        "best_checkpoint": str(best) if best else None,
        "best_score": run.checkpointing.best_score,
        "strategy": strategy.layout,
        "world_size": trainer.world_size,
        "precision": str(run.cfg.trainer.precision),
        "parameters": strategy.parameter_count,
        "samples_per_second": timings.get("samples_per_second"),
        "timings": timings,
        "bubble_share": strategy.bubble_share,
        "peak_memory_bytes": peak_bytes(trainer),
        "versions": {"torch": torch.__version__, "lightning": version("lightning")},
        "seconds": seconds,
    }
    if "tokens_per_second" in timings:
        summary["tokens_per_second"] = timings["tokens_per_second"]
    return summary


def finish(
    run: Run, *, reason: str, metrics: dict[str, float], seconds: float, preview: str | None
) -> None:
    """Write summary.json and report.html, and print the last lines: on rank 0.

    Args:
        reason: why the run ended, one of training.stop.REASONS or "finished".
        seconds: of training and testing.
        preview: text that shows what was learned.
    """
    if not run.trainer.is_global_zero:
        return
    folder = Path(run.cfg.run.dir)
    summary = summarize(run, reason=reason, metrics=metrics, seconds=seconds)
    run_dir.write_summary(folder, summary)
    run.samples.finish(run.trainer, preview)
    run.display.show_metrics(metrics)
    checkpoint = last_checkpoint(run.cfg)
    saved = "no checkpoint was saved" if checkpoint is None else f"checkpoint {checkpoint}"
    lines = [f"{reason} at step {summary['global_step']} after {seconds:.0f} s; {saved}"]
    if run.guard.skipped:
        lines.append(f"{run.guard.skipped} steps skipped (trainer.on_nan=skip); see {FILE}")
    if preview:
        lines.append(preview)
    script = "generate" if (folder / TOKENIZER_FILE).exists() else "evaluate"
    measured = [each for each in ("test", "validation") if is_overridden(f"{each}_step", run.task)]
    if reason == "finished" and checkpoint is not None and (script == "generate" or measured):
        option = " --chat" if (folder / CHAT_TEMPLATE).exists() else ""
        if script == "evaluate" and "test" not in measured:
            option = " --split val"
        command = project.as_typed(f"python scripts/{script}.py")
        lines.append(f"next: {command} {shlex.quote(run.cfg.run.dir)}{option}")
    elif reason == "max_time":
        lines.append(
            "to continue: the same command with its run.name and a longer trainer.max_time"
        )
    for line in lines:
        run.display.print(line)


def last_checkpoint(cfg: DictConfig) -> str | None:
    """Return the path of the run's last checkpoint as text, or None, also if its object store
    cannot be reached.
    """
    folder = resume.folder(Path(cfg.run.dir), cfg)
    try:
        with directory.errors_of_store(folder):
            found = resume.last_checkpoint(Path(cfg.run.dir), cfg)
            return None if found is None else str(found)
    except OSError as error:
        return f"unknown ({error})"
