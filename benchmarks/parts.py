"""The model, weights, data, optimizer and schedule of all contenders, from one job file, in plain
torch.

Job files are made from a command line's overrides (`benchmarks.job`), so that contenders need
neither Hydra nor Lightning.
"""

import hashlib
import importlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from armature.optim.groups import parameter_groups
from benchmarks.job import Job


def device_of(job: Job) -> torch.device:
    return (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        if job.device == "cuda"
        else torch.device(job.device)
    )


def call(node: dict[str, Any], *args: Any, **more: Any) -> Any:
    """Build a node as Hydra would."""
    module, _, name = node["_target_"].rpartition(".")
    kwargs = {key: value for key, value in node.items() if not key.startswith("_")}
    return getattr(importlib.import_module(module), name)(*args, **kwargs, **more)


def model_of(job: Job) -> nn.Module:
    """Return the model on its device, with the initial weights of training, compiled and so on as
    configured.
    """
    torch.manual_seed(job.seed)
    model = call(job.model)
    if hasattr(model, "initialize_parameter"):
        with torch.no_grad():
            for name, param in model.named_parameters():
                model.initialize_parameter(name, param, _generator(f"{job.seed}:model.{name}"))
    if job.compile != "none" or job.activation_checkpointing != "none" or job.float8:
        from armature.parallel import blocks

        blocks.convert_to_float8(blocks_of(model), float8=job.float8)
        blocks.checkpoint_activations(blocks_of(model), mode=job.activation_checkpointing)
        if job.compile != "none":
            compiled = blocks_of(model) if job.compile == "block" else [model]
            blocks.compile_forward(compiled, mode=job.compile_mode)
    return model.to(
        device_of(job), torch.bfloat16 if job.precision == "bf16-true" else torch.float32
    )


def _generator(name: str) -> torch.Generator:
    """Initialize as armature.parallel.initialization does, whose import takes longer than a bare
    loop's first step.
    """
    return torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    )


def optimizer_of(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    return call(job.optimizer, parameter_groups(model))


def schedule_of(job: Job, optimizer: torch.optim.Optimizer) -> Any:
    return call(job.scheduler, optimizer, job.total_steps)


def autocast(job: Job) -> torch.autocast:
    if job.precision == "16-mixed":
        raise ValueError(
            "trainer.precision=16-mixed: the bare loop has no gradient scaler. Type bf16-mixed."
        )
    return torch.autocast(job.device, dtype=torch.bfloat16, enabled=job.precision == "bf16-mixed")


class Samples(Dataset[dict[str, Tensor]]):
    """Windows of the memory-mapped tokens.

    Returns whole batches, which is fastest.
    """

    def __init__(self, job: Job) -> None:
        self.context = job.context
        self.tokens = np.memmap(job.tokens[0], dtype=job.tokens[1], mode="r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: rows[0] for name, rows in self.__getitems__([index]).items()}

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        width = self.context
        rows = np.stack([self.tokens[i * width : (i + 1) * width + 1] for i in indices]).astype(
            np.int64
        )
        windows = torch.from_numpy(rows)
        return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


def batches_of(job: Job) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's micro-batches on its device, in random order, without end."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    samples, device, micro = Samples(job), device_of(job), job.micro(ranks)
    random = np.random.default_rng(job.seed)
    while True:
        order = random.permutation(min(len(samples), 1 << 20))
        for start in range(rank * micro, len(order) - ranks * micro, ranks * micro):
            batch = samples.__getitems__(order[start : start + micro].tolist())
            if device.type == "cuda":
                batch = {name: rows.pin_memory() for name, rows in batch.items()}
            yield (
                batch["inputs"].to(device, non_blocking=True),
                batch["targets"].to(device, non_blocking=True),
            )


def loader_of(job: Job) -> DataLoader[Any]:
    """Return a DataLoader of whole batches, for contenders that need one."""
    random = torch.Generator().manual_seed(job.seed)
    pin = job.device == "cuda"
    return DataLoader(
        Samples(job),
        batch_size=job.micro(1),
        shuffle=True,
        generator=random,
        collate_fn=same,
        drop_last=True,
        pin_memory=pin,
    )


def same(batch: Any) -> Any:
    return batch


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks, or the whole model if it has none."""
    blocks = getattr(model, "blocks", None)
    return list(blocks.children()) if isinstance(blocks, nn.Module) else [model]
