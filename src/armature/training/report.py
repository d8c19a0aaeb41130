"""The line at the start of a run, summary.json, and the last lines on the screen."""

import math
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig

from armature import run_dir
from armature.checkpoint import directory, resume
from armature.data.batching import Batches
from armature.data.tokenizer import TOKENIZER_FILE
from armature.finetune.folder import CHAT_TEMPLATE
from armature.hardware import peak_resident_memory
from armature.strategies.base import StrategyMixin
from armature.training.display import Display
from armature.training.limits import Limits
from armature.training.not_finite import FILE, NotFiniteGuard
from armature.training.progress import completed_batches, data_of
from armature.training.run_report import RunReport
from armature.training.step_log import StepLog
from armature.training.trainer import Trainer


def start_line(
    cfg: DictConfig, batches: Batches, checkpoint: Path | None, trainer: L.Trainer
) -> str:
    """Return one line about layout, devices, precision and batch sizes."""
    assert isinstance(trainer, Trainer)
    ranks = trainer.world_size
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else None
    where = (
        f"{ranks} {cfg.trainer.accelerator} "
        f"rank{'s' * (ranks > 1)}{f' ({backend})' if backend else ''}"
    )
    machines = f" on {cfg.trainer.num_nodes} machines" if cfg.trainer.num_nodes > 1 else ""
    strategy = StrategyMixin.find(trainer)
    layout = strategy.layout if strategy is not None else type(trainer.strategy).__name__
    line = (
        f"{layout} · {where}{machines} · {cfg.trainer.precision} · "
        f"{type(trainer.optimizers[0]).__name__ if trainer.optimizers else 'no optimizer'} · "
        f"batch {batches.global_batch_size} = {batches.micro_batch_size} micro × "
        f"{batches.accumulate} accumulation × "
        f"{batches.data_ranks} data rank{'s' * (batches.data_ranks > 1)}{_batch_note(trainer)} · "
        f"{_parameters(trainer, strategy)} · {cfg.run.dir}"
    )
    divided = batches.micro_batch_size < batches.global_batch_size
    if divided and (sampler := getattr(data_of(trainer), "drawn_together", None)):
        held_out = ", in validation as well" if batches.data_ranks > 1 else ""
        line += (
            f"\neach batch of {sampler} is divided: collate_fn and the step get "
            f"{batches.micro_batch_size} of its "
            f"{batches.global_batch_size} samples{held_out}. If they belong together, as in an "
            "episode, type "
            f"strategy=single data.micro_batch_size={batches.global_batch_size}"
        )
    if note := getattr(trainer.lightning_module, "start_note", ""):
        line += f"\n{note}"
    if strategy is not None and (bubble := strategy.bubble_share):
        line += f"\nthe pipeline schedule leaves each rank idle for {bubble:.0%} of a step"
    return (
        line
        if checkpoint is None
        else f"{line}\nresuming from {checkpoint}, step {completed_batches(trainer)}"
    )


def _parameters(trainer: Trainer, strategy: StrategyMixin | None) -> str:
    count = trainer.parameter_count
    if strategy is None or strategy.trained_count == count:
        return f"{count:,} parameters"
    return f"{strategy.trained_count:,} of {count:,} parameters are trained"


def _batch_note(trainer: Trainer) -> str:
    return getattr(data_of(trainer), "batch_note", "")


def summarize(
    cfg: DictConfig,
    trainer: Trainer,
    step_log: StepLog,
    guard: NotFiniteGuard,
    limits: Limits,
    *,
    reason: str,
    metrics: dict[str, float],
    best: Path | None,
    best_score: float | None,
) -> dict[str, Any]:
    """Return the contents of summary.json, except the run's duration.

    Args:
        limits: the run's limits, by which a later start sees whether they were raised.
        reason: why the run ended, one of training.stop.REASONS or "finished".
        best, best_score: the checkpoint with the best value of checkpoint.monitor, and that value.
    """
    strategy = StrategyMixin.find(trainer)
    rate = step_log.trained_samples / step_log.trained_seconds if step_log.trained_seconds else None
    summary = {
        "stop_reason": reason,
        "global_step": completed_batches(trainer),
        "epochs": step_log.samples_seen / step_log.train_size,
        "samples": step_log.samples_seen,
        "planned_steps": limits.global_batches,
        "samples_per_epoch": step_log.train_size,
        "global_batch_size": step_log.global_batch_size,
        "loss_not_finite_since": step_log.not_finite_since,
        "skipped_steps": guard.skipped,
        **(
            {"expert_load": step_log.expert_load.by_expert()}
            if step_log.expert_load is not None
            else {}
        ),
        "metrics": {
            name: value if math.isfinite(value) else None for name, value in metrics.items()
        },
        "best_checkpoint": str(best) if best else None,
        "best_score": best_score,
        "strategy": strategy.layout if strategy is not None else type(trainer.strategy).__name__,
        "world_size": trainer.world_size,
        "precision": str(cfg.trainer.precision),
        "parameters": trainer.parameter_count,
        "samples_per_second": rate,
        "timings": step_log.summary(),
        "bubble_share": strategy.bubble_share if strategy is not None else 0.0,
        "peak_memory_bytes": _peak_memory(trainer),
        "versions": {"torch": torch.__version__, "lightning": version("lightning")},
    }
    if step_log.tokens_per_sample is not None and rate:
        summary["tokens_per_second"] = rate * step_log.tokens_per_sample
    return summary


def _peak_memory(trainer: Trainer) -> int:
    """Return this rank's peak memory in bytes: allocated on its GPU, or resident on a CPU."""
    if trainer.strategy.root_device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return peak_resident_memory()


def finish(
    cfg: DictConfig,
    trainer: Trainer,
    step_log: StepLog,
    guard: NotFiniteGuard,
    display: Display,
    limits: Limits,
    *,
    reason: str,
    metrics: dict[str, float],
    best: Path | None,
    best_score: float | None,
    seconds: float,
    preview: str | None,
    baselines: list[str],
) -> None:
    """Write summary.json and report.html, and print the last lines: on rank 0.

    Args:
        seconds: of training and testing.
        preview: text that shows what was learned.
        baselines: lines to compare the metrics with.
    """
    if not trainer.is_global_zero:
        return
    summary = summarize(
        cfg,
        trainer,
        step_log,
        guard,
        limits,
        reason=reason,
        metrics=metrics,
        best=best,
        best_score=best_score,
    )
    summary["seconds"] = seconds
    run_dir.write_summary(Path(cfg.run.dir), summary)
    RunReport.of(trainer).finish(trainer, preview)
    display.show_metrics(metrics)
    for line in baselines:
        display.print(line)
    checkpoint = last_checkpoint(cfg)
    saved = "no checkpoint was saved" if checkpoint is None else f"checkpoint {checkpoint}"
    display.print(f"{reason} at step {summary['global_step']} after {seconds:.0f} s; {saved}")
    if guard.skipped:
        display.print(f"{guard.skipped} steps skipped (trainer.on_nan=skip); see {FILE}")
    elif step_log.not_finite_since is not None:
        now = step_log.last.get("train/loss", math.nan)
        ending = "it recovered" if math.isfinite(now) else "the weights are of no use"
        display.print(
            f"train/loss was not finite at step {step_log.not_finite_since}; at the end, it is "
            f"{now}: {ending}"
        )
    if preview:
        display.print(preview)
    if reason == "finished" and checkpoint is not None:
        script = "generate" if (Path(cfg.run.dir) / TOKENIZER_FILE).exists() else "evaluate"
        option = " --chat" if (Path(cfg.run.dir) / CHAT_TEMPLATE).exists() else ""
        if script == "evaluate" and not is_overridden("test_step", trainer.lightning_module):
            option = " --split val"
        display.print(f"next: python scripts/{script}.py {shlex.quote(cfg.run.dir)}{option}")
    elif reason == "max_time":
        display.print(
            f"to continue: the same command with run.name={cfg.run.name} and a longer "
            "trainer.max_time"
        )


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
