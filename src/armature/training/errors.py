"""Errors of training, recorded for the process that started the rank, what Lightning refuses in a
user's class, and memory that has run out.
"""

import itertools
import re
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from armature.errors import ConfigError, EndedByCode, MicroBatchTooLarge, is_users, users_frames
from armature.hardware import peak_resident_memory
from armature.launcher import environment
from armature.parallel.gradients import local_part
from armature.validation import memory

_LIGHTNING = str(Path(L.__file__).parent)
WORDS = ("out of memory", "can't allocate memory", "not enough memory", "Cannot allocate memory")


def record(error: BaseException) -> None:
    """Record an error for the agent, which shows the earliest one.

    Only a rank's first call counts.
    """
    file = environment.error_file()
    if file is not None and not file.exists():
        if isinstance(error, SystemExit | KeyboardInterrupt):
            error = EndedByCode.by(error)
        get_error_handler().record_exception(error)


class RecordError(L.Callback):
    """Record an error at once: Trainer teardown closes connections, and another rank would seem to
    fail first.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg

    def on_exception(
        self, trainer: Any, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        from armature.training import micro_batch  # which import this file
        from armature.training.stop import StoppedBySignal

        smaller = None
        together = isinstance(exception, StoppedBySignal)  # on all ranks
        trainer.failed = not together
        if is_out_of_memory(exception):
            with suppress(Exception):  # an explanation must not hide the error
                kinds = bytes_by_kind(pl_module, trainer.optimizers, peak=peak_bytes(trainer))
                evaluates = trainer.evaluating or trainer.predicting
                exception.add_note(
                    memory_line(self.cfg, kinds, where=place(trainer), evaluates=evaluates)
                )
                smaller = micro_batch.smaller(self.cfg, exception, trainer, kinds)
        if smaller is not None:
            again = "The same command continues with it; launch.max_restarts=1 does so by itself."
            exception.add_note(f"{smaller} {again}")
            record(MicroBatchTooLarge(smaller))
            return
        if together:
            return
        if (explain := getattr(trainer.strategy, "explain", None)) is not None:
            explain(exception)
        record(refusal_of(exception, pl_module) or exception)


def refusal_of(error: BaseException, module: L.LightningModule) -> ConfigError | None:
    """Return what Lightning refuses in a user's class, as one message: its own traceback often has
    no line of the user's. None for other errors, whose traceback is shown.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ConfigError) or not frames:
        return None
    last = frames[-1]
    # not the call of trainer.fit
    within = itertools.dropwhile(lambda frame: is_users(frame.filename), frames)
    own = users_frames(within)
    raised = last.filename.startswith(_LIGHTNING) and (last.line or "").startswith("raise ")
    if not raised and not isinstance(error, MisconfigurationException):
        return None
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    text = re.sub(r"tensor\([^()]*\)", "tensor(…)", str(error))  # each number of it
    return ConfigError(f"{type(module).__name__}{place}: {text}")


# ------------------------------------------------------------------- memory that has run out
def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on any device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(words in str(error) for words in WORDS)


def memory_line(
    cfg: DictConfig, kinds: Mapping[str, float], *, where: str, evaluates: bool = False
) -> str:
    """Return what this rank held by kind, and the overrides that would help most.

    `evaluates`: it ran out in validation, test or prediction, whose batches have a size of their
    own.
    """
    parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in kinds.items())
    held = f"At the peak this rank held {sum(kinds.values()) / 2**30:.2f} GiB: {parts}."
    size = cfg.data.get("eval_batch_size")
    if evaluates and isinstance(size, int) and size > 1:
        return (
            f"Memory ran out on {where}, in an evaluation. {held} Type "
            f"data.eval_batch_size={size // 2}."
        )
    return f"Memory ran out on {where}. {held}{memory.remedy(cfg, kinds=kinds)}"


def bytes_by_kind(
    module: L.LightningModule, optimizers: Iterable[Any], *, peak: int
) -> dict[str, float]:
    """Return this rank's bytes by kind; what the peak has beyond weights, gradients and state is
    the last kind.
    """
    params = [*module.parameters()]
    states = [
        value for each in optimizers for state in each.state.values() for value in state.values()
    ]
    kinds = {
        "parameters": _bytes([*params, *module.buffers()]),
        "gradients": _bytes(param.grad for param in params if param.grad is not None),
        "optimizer state": _bytes(value for value in states if isinstance(value, Tensor)),
    }
    return {**kinds, "activations and other": max(0, peak - sum(kinds.values()))}


def _bytes(tensors: Iterable[Tensor]) -> int:
    here = {id(tensor): local_part(tensor) for tensor in tensors}
    return sum(
        tensor.numel() * tensor.element_size() for tensor in here.values() if not tensor.is_meta
    )


def peak_bytes(trainer: L.Trainer) -> int:
    """Return the most that this rank has held: of its GPU's memory, else of the process."""
    device = trainer.strategy.root_device
    return (
        torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_memory()
    )


def place(trainer: L.Trainer) -> str:
    device, rank = trainer.strategy.root_device, f"rank {trainer.global_rank}"
    return f"GPU {device.index} ({rank})" if device.type == "cuda" else rank
