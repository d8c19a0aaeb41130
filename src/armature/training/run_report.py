"""Keep report.html in the run directory: at most 1% of a run's time, and nothing of it in a
training step.

Rank 0 writes. All ranks take part in two small collectives per validation: whether the page is due,
and the memory of
each rank. What goes wrong with the page is logged once and never ends the run.
"""

from __future__ import annotations

import base64
import inspect
import json
import logging
import platform
import socket
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from omegaconf import DictConfig
from torch import Tensor
from typing_extensions import override

from armature import files, hardware
from armature.errors import error_line, masked
from armature.pages import report
from armature.pages.history import EVENTS
from armature.parallel import process_group
from armature.strategies.base import StrategyMixin
from armature.training import memory
from armature.training.limits import Limits
from armature.training.progress import completed_batches, data_of
from armature.training.step_log import StepLog

log = logging.getLogger(__name__)
SHARE = 0.01  # of the run's time, for pages and samples; the first ones are always made
IMAGES, PIXELS = 16, 64  # per validation; larger images are reduced to so many pixels per side
CHARACTERS = 4000  # of a text


class RunReport(L.Callback):
    """Write report.html at validations and at the end, and report.jsonl with what no other file of
    the run has.

    Args:
        limits: of the run: after its last step, the sample that ends the run is the last one.
    """

    def __init__(self, cfg: DictConfig, step_log: StepLog, *, limits: Limits) -> None:
        self.cfg, self.step_log, self.planned_steps = cfg, step_log, limits.global_batches
        self.run_dir = Path(cfg.run.dir)
        self._began = self._spent = 0.0
        self._due = self._failed = False
        self.enabled = bool(cfg.run.report)

    @classmethod
    def of(cls, trainer: L.Trainer) -> RunReport:
        callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        return next(callback for callback in callbacks if isinstance(callback, cls))

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began = time.monotonic()
        if trainer.is_global_zero and self.enabled:
            self._try(lambda: self._write_event("start", trainer, **self._start(trainer)))

    def _start(self, trainer: L.Trainer) -> dict[str, Any]:
        strategy, git = StrategyMixin.find(trainer), self.cfg.run.git or {}
        device = trainer.strategy.root_device
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        return {
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
            "ranks": trainer.world_size,
            "layout": strategy.layout if strategy is not None else type(trainer.strategy).__name__,
            "precision": str(self.cfg.trainer.precision),
            "planned_steps": self.planned_steps,
            "parameters": getattr(trainer, "parameter_count", None),
            "host": socket.gethostname(),
            "python": sys.version.split()[0],
            "system": platform.platform(),
            "processor": hardware.cpu_name(),
            "devices": gpu and f"{trainer.world_size} × {gpu}",
            "commit": git.get("commit"),
            "dirty": git.get("dirty"),
            "versions": {"torch": torch.__version__, "lightning": version("lightning")},
        }

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit" and self.enabled:
            within = self._spent <= SHARE * (time.monotonic() - self._began)
            self._due = process_group.broadcast_object(within) and not trainer.sanity_checking

    @override
    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if (
            self._due
            and batch_idx == dataloader_idx == 0
            and shows_images(pl_module, batch)
            and can_sample(trainer)
        ):
            self._timed(trainer, lambda: self._sample_images(trainer, pl_module, batch))

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._due:
            return
        self._due = False
        self._write_memory(trainer)
        last = self.planned_steps is not None and completed_batches(trainer) >= self.planned_steps
        preview = preview_of(pl_module)
        if preview is not None and not last and can_sample(trainer):
            self._timed(trainer, lambda: self._write_text(trainer, _alone(preview)))
        if trainer.is_global_zero:
            self._timed(trainer, lambda: self._write(running=True))

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.enabled:
            self._write_memory(trainer)

    def finish(self, trainer: L.Trainer, preview: str | None) -> None:
        """Write the page of a run that has ended, with its summary.

        `preview`: what was learned, as text.
        """
        if trainer.is_global_zero and self.enabled:
            self._try(lambda: self._write_text(trainer, preview))
            self._try(lambda: self._write(running=False))

    def _write(self, *, running: bool) -> None:
        page = report.make(self.run_dir, running=running, newest=self.step_log.csv.held)
        files.replace(self.run_dir / report.NAME, page)

    def _write_memory(self, trainer: L.Trainer) -> None:
        gib = process_group.all_gather_object(memory.peak_bytes(trainer) / 2**30)
        if trainer.is_global_zero:
            self._try(
                lambda: self._write_event(
                    "memory", trainer, memory_gib=[round(each, 4) for each in gib]
                )
            )

    def _write_text(self, trainer: L.Trainer, text: Any) -> None:
        if isinstance(text, str) and text and trainer.is_global_zero:
            self._write_event("text", trainer, text=text[:CHARACTERS])

    def _sample_images(
        self, trainer: L.Trainer, module: L.LightningModule, batch: dict[str, Tensor]
    ) -> None:
        """Predict a few images on every rank: a sharded model needs all of them.

        Rank 0 writes its own.
        """
        few = {name: value[:IMAGES] for name, value in batch.items()}
        with torch.no_grad(), trainer.precision_plugin.val_step_context():
            predicted = _alone(lambda: module.predict_step(few, 0))
        if trainer.is_global_zero and isinstance(predicted, dict) and "class" in predicted:
            names = getattr(data_of(trainer), "class_names", None)
            shown = image_rows(few["inputs"], few.get("targets"), predicted["class"], names)
            self._write_event("images", trainer, images=shown)

    def _write_event(self, event: str, trainer: L.Trainer, **values: Any) -> None:
        line = masked(
            json.dumps({"event": event, "step": completed_batches(trainer), **values}, default=str)
        )
        with (self.run_dir / EVENTS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _timed(self, trainer: L.Trainer, work: Callable[[], None]) -> None:
        started = time.monotonic()
        self._try(work)
        self._spent += time.monotonic() - started

    def _try(self, work: Callable[[], None]) -> None:
        """Do what the run does not depend on."""
        try:
            work()
        except Exception as error:
            if not self._failed:
                log.warning(
                    "%s lacks a part: %s. Training does not need it.",
                    report.NAME,
                    error_line(error),
                )
            self._failed = True


def can_sample(trainer: L.Trainer) -> bool:
    strategy = StrategyMixin.find(trainer)
    return strategy is None or strategy.can_generate


def preview_of(module: L.LightningModule) -> Callable[[], str | None] | None:
    """Return the module's `preview()`. One that takes arguments has another purpose."""
    preview = getattr(module, "preview", None)
    if not callable(preview):
        return None
    needed = [p for p in inspect.signature(preview).parameters.values() if p.default is p.empty]
    takes_more = any(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in needed)
    return None if takes_more else cast(Callable[[], str | None], preview)


def _alone(work: Callable[[], Any]) -> Any:
    """Return what `work` returns, without a trace in the random streams of the run."""
    with isolate_rng():
        return work()


def shows_images(module: L.LightningModule, batch: Any) -> bool:
    inputs = batch.get("inputs") if isinstance(batch, dict) else None
    is_image = isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.shape[1] in (1, 3)
    return (
        is_image
        and getattr(module, "modality", None) == "images"
        and is_overridden("predict_step", module)
    )


def image_rows(
    images: Tensor, targets: Tensor | None, predicted: Tensor, names: list[str] | None
) -> list[dict[str, Any]]:
    """Return images of one scale of gray or colors as base64, with the names of their classes."""
    pixels_BCHW = images.detach().float().cpu()
    side = max(pixels_BCHW.shape[-2:])
    if side > PIXELS:
        pixels_BCHW = F.interpolate(pixels_BCHW, scale_factor=PIXELS / side, mode="area")
    low, high = pixels_BCHW.min(), pixels_BCHW.max()
    pixels_BCHW = (
        (255 * (pixels_BCHW - low) / (high - low).clamp(min=1e-12)).round().to(torch.uint8)
    )

    def name(index: Tensor) -> str:
        number = int(index)
        return names[number] if names and 0 <= number < len(names) else str(number)

    rows = []
    for i, image_CHW in enumerate(pixels_BCHW):
        height, width = image_CHW.shape[-2:]
        raw = image_CHW.permute(1, 2, 0).contiguous().numpy().tobytes()
        row = {
            "width": width,
            "height": height,
            "pixels": base64.b64encode(raw).decode(),
            "predicted": name(predicted[i]),
        }
        if targets is not None and targets.ndim == 1:
            row["target"] = name(targets[i])
        rows.append(row)
    return rows
