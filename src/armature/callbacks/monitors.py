"""Measure a run's rates, memory and weights, in columns besides those of the step log.

Rates, memory and MFU go to timings.csv and to the loggers. Norms, which do not depend on the clock,
also go to metrics.csv.
"""

# pyright: reportPrivateImportUsage=false

import logging
from typing import Any

import lightning as L
import psutil
import torch
from torch import Tensor
from typing_extensions import override

from armature import hardware
from armature.strategies.base import StrategyMixin
from armature.training import flops
from armature.training.progress import completed_batches
from armature.training.step_log import StepLog
from armature.training.timings import Window

log = logging.getLogger(__name__)
GIB = 2**30


class Monitors(L.Callback):
    """Add to the step log what the arguments select.

    Args:
        mfu: model FLOPs utilization, the share of the hardware's arithmetic that the model uses;
            and samples and tokens per second of one rank.
        peak_tflops: of one device; None: a GPU's published dense bf16 rate. A CPU has none.
        memory: GiB (`memory/…`): on a GPU allocated, reserved and peak allocated; on a CPU resident
            and peak resident.
        norms_every_n_steps: report the norm of the weights (`train/weight_norm`) at multiples of
            it; None: never. With adapters, of what is trained: the frozen ones would hide it.
    """

    def __init__(
        self,
        *,
        mfu: bool = True,
        peak_tflops: float | None = None,
        memory: bool = True,
        norms_every_n_steps: int | None = 50,
    ) -> None:
        given = {"peak_tflops": peak_tflops, "norms_every_n_steps": norms_every_n_steps}
        for name, value in given.items():
            if value is not None and value <= 0:
                raise ValueError(
                    f"callbacks.monitors.{name} must be positive, or null. Got {value}"
                )
        self.mfu, self.memory, self.peak_tflops = mfu, memory, peak_tflops
        self.norms_every_n_steps = norms_every_n_steps
        self._strategy: StrategyMixin | None = None  # whose weights have a norm
        self._peak: float | None = None
        self._flops: float | None = None
        self._counted = False

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        step_log = StepLog.of(trainer)
        self._log, self._process = step_log, psutil.Process()
        step_log.monitors.append(self)
        if self.mfu:
            self._peak = self._peak_of(trainer.strategy.root_device)
        if self.norms_every_n_steps is not None:
            self._strategy = StrategyMixin.of(trainer)
            if not self._strategy.can_read_weights:
                log.warning("DeepSpeed's ZeRO-3 does not expose its weights: no norm is logged.")
                self._strategy = None
        step_log.restart_clock()

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._counted:
            self._counted = True
            if self._peak is not None:
                self._flops = _flops_of(pl_module, batch)
            self._log.restart_clock()

    def batch_ended(self, trainer: L.Trainer, *, stepped: bool) -> dict[str, Tensor]:
        every, strategy = self.norms_every_n_steps, self._strategy
        if every is None or strategy is None or not stepped or completed_batches(trainer) % every:
            return {}
        return {"train/weight_norm": strategy.norm([*strategy.trained_weights().values()])}

    def measured(self, trainer: L.Trainer, window: Window) -> dict[str, float]:
        values: dict[str, float] = {}
        if self.mfu:
            per_rank = window.samples / window.seconds / trainer.world_size
            values["samples_per_second_per_rank"] = per_rank
            if self._log.tokens_per_sample is not None:
                values["tokens_per_second_per_rank"] = per_rank * self._log.tokens_per_sample
            if self._peak is not None and self._flops is not None:
                values["mfu"] = self._flops * per_rank / self._peak
        if self.memory:
            values |= memory_of(trainer.strategy.root_device, self._process)
        return values

    def _peak_of(self, device: torch.device) -> float | None:
        if self.peak_tflops is not None:
            return self.peak_tflops * 1e12
        if device.type != "cuda":
            return None
        peak = hardware.published_peak(torch.cuda.get_device_name(device))
        if peak is None:
            log.warning(
                "The peak rate of this device is not known, so there is no mfu. Type "
                "callbacks.monitors.peak_tflops=… "
                "(dense bf16, from its data sheet), or callbacks.monitors.mfu=false."
            )
        return peak


def memory_of(device: torch.device, process: psutil.Process) -> dict[str, float]:
    """Return the GiB that this rank uses: on its GPU, or as a process."""
    if device.type == "cuda":
        stats, key = torch.cuda.memory_stats(device), "{}_bytes.all.{}".format
        found = {
            "allocated": stats.get(key("allocated", "current"), 0),
            "reserved": stats.get(key("reserved", "current"), 0),
            "peak": stats.get(key("allocated", "peak"), 0),
        }
    else:
        found = {"resident": process.memory_info().rss, "peak": hardware.peak_resident_memory()}
    return {f"memory/{name}_gib": size / GIB for name, size in found.items() if size}


def _flops_of(module: L.LightningModule, batch: Any) -> float | None:
    """Return the FLOPs of one sample, or None for a task or batches of another kind than ours."""
    make_model = getattr(module, "_make_model", None)
    if make_model is None or not isinstance(batch, dict) or "inputs" not in batch:
        return None
    return flops.flops_per_sample(make_model, batch["inputs"], batch.get("targets"))
