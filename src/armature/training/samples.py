"""Keep samples of what a run learns in report.jsonl, for report.html: outside of training steps,
and at most 1% of the time.

What goes wrong with a sample is logged once and never ends the run.
"""

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
from typing import Any

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
from armature.training.progress import completed_batches, feed_of

log = logging.getLogger(__name__)
SHARE = 0.01  # of the run's time, for samples; the first ones are always made
IMAGES, PIXELS = 16, 64  # per validation; larger images are reduced to so many pixels per side
CHARACTERS = 4000  # of a text


class Samples(L.Callback):
    """Write a line per start of the run, and a text or images per validation.

    Args:
        planned_steps: after the last one, the sample that ends the run is the last one.
    """

    def __init__(self, cfg: DictConfig, *, planned_steps: int | None) -> None:
        self.cfg, self.planned_steps = cfg, planned_steps
        self._began = self._spent = 0.0
        self._due = self._failed = False

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began = time.monotonic()
        self._try(lambda: self._write(trainer, "start", **self._start(trainer)))
        self._spent = 0.0  # on samples

    def _start(self, trainer: L.Trainer) -> dict[str, Any]:
        strategy, git = StrategyMixin.of(trainer), self.cfg.run.git or {}
        device = trainer.strategy.root_device
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        return {
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
            "ranks": trainer.world_size,
            "layout": strategy.layout,
            "precision": str(self.cfg.trainer.precision),
            "planned_steps": self.planned_steps,
            "parameters": strategy.parameter_count,
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
        self._due = False
        if trainer.state.fn == "fit" and StrategyMixin.of(trainer).can_generate:
            within = self._spent <= SHARE * (time.monotonic() - self._began)
            self._due = process_group.broadcast_object(within)

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
        if self._due and batch_idx == dataloader_idx == 0 and shows_images(pl_module, batch):
            self._try(lambda: self._sample_images(trainer, pl_module, batch))

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        last = self.planned_steps is not None and completed_batches(trainer) >= self.planned_steps
        if self._due and not last and (preview := preview_of(pl_module)):
            self._try(lambda: self.write_text(trainer, preview()))
        self._due = False

    def write_text(self, trainer: L.Trainer, text: Any) -> None:
        if isinstance(text, str) and text:
            self._write(trainer, "text", text=text[:CHARACTERS])

    def _sample_images(
        self, trainer: L.Trainer, module: L.LightningModule, batch: dict[str, Tensor]
    ) -> None:
        """Predict a few images on every rank: a sharded model needs all of them.

        Rank 0 writes its own.
        """
        few = {name: value[:IMAGES] for name, value in batch.items()}
        with torch.no_grad(), trainer.precision_plugin.val_step_context():
            predicted = module.predict_step(few, 0)
        if isinstance(predicted, dict) and "class" in predicted:
            names = feed_of(trainer).assets.class_names
            shown = image_rows(few["inputs"], few.get("targets"), predicted["class"], names)
            self._write(trainer, "images", images=shown)

    def finish(self, trainer: L.Trainer, preview: str | None) -> None:
        """Write the last sample and the page of a run that has ended, with its summary."""
        self._try(lambda: self.write_text(trainer, preview))
        run = Path(self.cfg.run.dir)
        self._try(lambda: files.replace(run / report.NAME, report.make(run)))

    def _write(self, trainer: L.Trainer, event: str, **values: Any) -> None:
        if not trainer.is_global_zero:
            return
        row = {"event": event, "step": completed_batches(trainer), **values}
        with (Path(self.cfg.run.dir) / EVENTS).open("a", encoding="utf-8") as file:
            file.write(masked(json.dumps(row, default=str)) + "\n")

    def _try(self, work: Callable[[], None]) -> None:
        """Do what the run does not depend on, and without a trace in its random streams."""
        if not self.cfg.run.report:
            return
        started = time.monotonic()
        with isolate_rng():
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
        self._spent += time.monotonic() - started


def preview_of(module: L.LightningModule) -> Callable[[], str | None] | None:
    """Return the module's `preview()`. One that needs arguments has another purpose."""
    preview: Any = getattr(module, "preview", None)
    try:
        inspect.signature(preview).bind()
    except TypeError:  # none, or no method
        return None
    return preview


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
