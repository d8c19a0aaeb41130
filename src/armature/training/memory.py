"""What a message about missing memory says: what the rank held by kind, and what to type."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from omegaconf import DictConfig
from torch import Tensor

from armature.hardware import peak_resident_memory
from armature.parallel.gradients import local_part
from armature.validation import memory


def by_kind(module: LightningModule, optimizers: Iterable[Any], *, peak: int) -> dict[str, float]:
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


def message(
    cfg: DictConfig, kinds: Mapping[str, float], *, where: str, evaluates: bool = False
) -> str:
    """Return lines with the peak by kind and the overrides that would help most.

    `evaluates`: it ran out in validation, test or prediction, whose batches have a size of their
    own.
    """
    total = sum(kinds.values())
    parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in kinds.items())
    held = f"At the peak this rank held {total / 2**30:.2f} GiB: {parts}."
    size = cfg.data.get("eval_batch_size")
    if evaluates and isinstance(size, int) and size > 1:
        return (
            f"Memory ran out on {where}, in an evaluation. {held} Type "
            f"data.eval_batch_size={size // 2}."
        )
    return f"Memory ran out on {where}. {held}{memory.remedy(cfg, kinds=kinds)}"


def explain(cfg: DictConfig, trainer: Trainer, module: LightningModule) -> str:
    """Return the message for a rank in which memory ran out."""
    kinds = by_kind(module, trainer.optimizers, peak=peak_bytes(trainer))
    evaluates = trainer.evaluating or trainer.predicting
    return message(cfg, kinds, where=place(trainer), evaluates=evaluates)


def peak_bytes(trainer: Trainer) -> int:
    """Return the most that this rank has held: of its GPU's memory, else of the process."""
    device = trainer.strategy.root_device
    return (
        torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_memory()
    )


def place(trainer: Trainer) -> str:
    device, rank = trainer.strategy.root_device, f"rank {trainer.global_rank}"
    return f"GPU {device.index} ({rank})" if device.type == "cuda" else rank
