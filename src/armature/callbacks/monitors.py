"""What a run makes of its time, its memory and its weights: columns beside those of the step log.

Times, memory and MFU go to timings.csv and to the loggers; norms, which do not depend on the clock, to metrics.csv too.
"""

import logging
from typing import Any

import lightning as L
import psutil
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from armature import hardware
from armature.callbacks.norms import Norms
from armature.training import flops
from armature.training.step_log import StepLog
from armature.training.timings import DataWait, Window

log = logging.getLogger(__name__)
GIB = 2**30


class Monitors(L.Callback):
    """Adds to the step log what its arguments name; each of them can be left out.

    Args:
        phases: seconds a step for data, forward, backward, optimizer and the rest (`time/…`).
        mfu: model FLOPs utilization, the share of the hardware's arithmetic that the model makes use of; and samples
            and tokens a second of one rank.
        peak_tflops: of one device; None: the published dense bf16 rate of a GPU, measured for CPUs.
        memory: GiB allocated, reserved and at most allocated on a GPU; resident, and at most, on a CPU (`memory/…`).
        norms_every_n_steps: the norm of the weights (`train/weight_norm`) at multiples of it; None: never.
        norms_by_part: with it, the norms of weights and gradients of each block and each end.
        update_ratio: with it, the norm of the step's change over that of the weights; holds a copy of them for a step.
    """

    def __init__(
        self,
        *,
        phases: bool = True,
        mfu: bool = True,
        peak_tflops: float | None = None,
        memory: bool = True,
        norms_every_n_steps: int | None = 50,
        norms_by_part: bool = False,
        update_ratio: bool = False,
    ) -> None:
        for name, value in (("peak_tflops", peak_tflops), ("norms_every_n_steps", norms_every_n_steps)):
            if value is not None and value <= 0:
                raise ValueError(f"callbacks.monitors.{name} must be positive, or null. Got {value}")
        if norms_every_n_steps is None and (norms_by_part or update_ratio):
            raise ValueError("norms_by_part and update_ratio need callbacks.monitors.norms_every_n_steps. Got null")
        self.phases, self.mfu, self.memory = phases, mfu, memory
        self.peak_tflops = peak_tflops
        self.norms = (
            Norms(norms_every_n_steps, by_part=norms_by_part, update_ratio=update_ratio)
            if norms_every_n_steps is not None
            else None
        )
        self._phases: Phases | None = None
        self._peak: float | None = None
        self._flops: float | None = None
        self._counted = False

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        log = StepLog.of(trainer)
        assert log.wait is not None  # it comes before this callback
        self._log, self._process = log, psutil.Process()
        if self not in log.monitors:
            log.monitors.append(self)
        if self.phases:
            self._phases = Phases(trainer, log.wait)
        if self.mfu:
            self._peak = self._peak_of(trainer)
        if self.norms is not None:
            self.norms.begin(trainer)
        log.restart_clock()

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._counted:
            self._counted = True
            if self._peak is not None:
                self._flops = _flops_of(pl_module, batch)
            self._log.restart_clock()
        if self._phases is not None:
            self._phases.begin()

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if self._phases is not None:
            self._phases.next()

    @override
    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._phases is not None:
            self._phases.next()

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if self.norms is not None:
            self.norms.before_step(trainer)

    def batch_ended(self, trainer: L.Trainer, *, stepped: bool) -> dict[str, Tensor]:
        if self._phases is not None:
            self._phases.end(stepped=stepped)
        return self.norms.after_step(trainer) if self.norms is not None and stepped else {}

    def measured(self, trainer: L.Trainer, window: Window) -> dict[str, float]:
        values: dict[str, float] = {}
        if self.mfu:
            per_rank = window.samples / window.seconds / trainer.world_size
            values["samples_per_second_per_rank"] = per_rank
            if self._log.tokens_per_sample is not None:
                values["tokens_per_second_per_rank"] = per_rank * self._log.tokens_per_sample
            if self._peak is not None and self._flops is not None:
                values["mfu"] = self._flops * per_rank / self._peak
        if self._phases is not None:
            values |= self._phases.read(window)
        if self.memory:
            values |= memory_of(trainer.strategy.root_device, self._process)
        return values

    def _peak_of(self, trainer: L.Trainer) -> float | None:
        if self.peak_tflops is not None:
            return self.peak_tflops * 1e12
        device = trainer.strategy.root_device
        if device.type == "cpu":
            return flops.measured_peak(_compute_dtype(str(trainer.precision)))
        peak = hardware.published_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        if peak is None:
            log.warning(
                "The peak of this device is not known, so there is no mfu. Type callbacks.monitors.peak_tflops=… "
                "(dense bf16, from its data sheet), or callbacks.monitors.mfu=false."
            )
        return peak


class Phases:
    """Where a step's seconds go. Marks on the device's clock, which are read when rows are written.

    What a strategy sends lies inside the phase that waits for it: DDP's and FSDP's gradients in backward, FSDP's
    weights in forward and backward, a pipeline's whole schedule in forward. Only where ddp accumulates can its part be
    told: the last micro-batch's backward sends, and the others do the same without (`time/communication`, which is part
    of `time/backward`).
    """

    def __init__(self, trainer: L.Trainer, wait: DataWait) -> None:
        self._clock, self._mark = wait.marks, wait.marks.mark
        self._marks: list[Any] = []  # of the micro-batch under way
        self._batches: list[tuple[list[Any], bool]] = []
        strategy: Any = trainer.strategy
        self._sends_once = (
            isinstance(strategy, DDPStrategy)
            and not strategy.handles_gradient_accumulation
            and trainer.world_size > 1
            and trainer.accumulate_grad_batches > 1
        )

    def begin(self) -> None:
        self._marks = [self._mark()]

    def next(self) -> None:
        self._marks.append(self._mark())

    def end(self, *, stepped: bool) -> None:
        self._marks.append(self._mark())
        self._batches.append((self._marks, stepped))

    def read(self, window: Window) -> dict[str, float]:
        """Seconds a step of each phase; the marks are forgotten."""
        forward = backward = optimizer = 0.0
        alone, sending = [], []  # backward passes
        seconds = self._clock.seconds
        for marks, stepped in self._batches:
            if len(marks) != 4:
                continue  # a task that steps by hand has an order of its own
            start, computed, derived, end = marks
            forward += seconds(start, computed)
            span = seconds(computed, derived)
            backward += span
            (sending if stepped else alone).append(span)
            if stepped:
                optimizer += seconds(derived, end)
        self._batches = []
        sums = {"data": window.data_wait, "forward": forward, "backward": backward, "optimizer": optimizer}
        sums["other"] = max(0.0, window.seconds - sum(sums.values()))
        values = {f"time/{name}": value / window.steps for name, value in sums.items()}
        if self._sends_once and alone and sending:
            values["time/communication"] = max(0.0, sum(sending) / len(sending) - sum(alone) / len(alone))
        return values


def memory_of(device: torch.device, process: psutil.Process) -> dict[str, float]:
    """GiB of this rank: on its GPU, or of its process."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        names = {"allocated": "allocated_bytes.all.current", "reserved": "reserved_bytes.all.current"}
        names["peak"] = "allocated_bytes.all.peak"
        return {f"memory/{name}_gib": stats.get(key, 0) / GIB for name, key in names.items()}
    values = {"memory/resident_gib": process.memory_info().rss / GIB}
    if peak := hardware.peak_resident_memory():
        values["memory/peak_gib"] = peak / GIB
    return values


def _flops_of(module: L.LightningModule, batch: Any) -> float | None:
    """Of one sample, where the task and its batches are made as ours are."""
    make_model = getattr(module, "_make_model", None)
    if make_model is None or not isinstance(batch, dict) or "inputs" not in batch:
        return None
    return flops.flops_per_sample(make_model, batch["inputs"], batch.get("targets"))


def _compute_dtype(precision: str) -> torch.dtype:
    return torch.bfloat16 if precision.startswith("bf16") else torch.float32
