"""Record what a run computes, so that `armature.proof.locate` finds where two runs part.

One file per rank, one JSON line per optimizer step. Tensors become three numbers (`statistic`).
These add up over micro-batches and ranks, so that a batch that two ranks share can be compared with
the same batch in one process.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import lightning.pytorch as L
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from armature.data.samples import tensors
from armature.run_dir import TRACE
from armature.training import user_state
from armature.training.progress import completed_batches


class Nudge(Callback):
    """Change each weight by about one rounding of fp32 before the first step: where a run then
    parts from an undisturbed one, training amplifies what no layout can keep.
    """

    @override
    def on_train_start(self, trainer: Trainer, pl_module: L.LightningModule) -> None:
        generator = torch.Generator().manual_seed(0)  # the run's own draws stay as they are
        with torch.no_grad():
            for param in pl_module.parameters():
                if param.is_floating_point():
                    signs = torch.randn(param.shape, generator=generator).sign().to(param.device)
                    param.mul_(1 + torch.finfo(torch.float32).eps * signs)


class Trace(Callback):
    """Write digests of samples, weights, module inputs and outputs, losses and gradients.

    python train.py experiment=mine '+callbacks.trace={_target_:armature.callbacks.trace.Trace}'

    Args:
        steps: the first optimizer steps, which are recorded.
    """

    def __init__(self, steps: int = 8) -> None:
        self.steps = steps
        self._record: dict[str, Any] | None = None  # of the step under way
        self._file: TextIO | None = None
        self._random = b""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: L.LightningModule) -> None:
        folder = Path(trainer.default_root_dir) / TRACE
        folder.mkdir(exist_ok=True)
        # appended: a resumed run repeats a step, and its last record counts
        self._file = (folder / f"rank_{trainer.global_rank:04}.jsonl").open("a")
        for name, module in pl_module.named_modules():
            if name:
                module.register_forward_hook(self._hook(name), with_kwargs=True)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step = completed_batches(trainer) + 1
        if step > self.steps:
            return
        if self._record is None:
            self._record = {
                "step": step,
                "generators": user_state.generators(trainer),
                "weights": _statistics(
                    dict(pl_module.named_parameters()) | dict(pl_module.named_buffers())
                ),
                "pieces": [],
                "modules": {},
                "gradients": {},
            }
        samples, shape = sample_digests(batch)
        self._record["pieces"].append({"samples": samples, "shape": shape, "targets": {}})
        self._random = _random_state()

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        if self._record is None:
            return
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        gradients = {
            name: param.grad
            for name, param in pl_module.named_parameters()
            if id(param) in own and param.grad is not None
        }
        self._record["gradients"] |= _statistics(gradients)

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._record is None:
            return
        piece = self._record["pieces"][-1]
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):  # Lightning has divided it by the micro-batches of a step
            piece["loss"] = float(loss) * trainer.accumulate_grad_batches
        # backward meets the last output first: its rows with a gradient are the targets that count
        piece["targets"] = next(iter(piece["targets"].values()), None)
        piece["draws"] = self._random != _random_state()
        if completed_batches(trainer) >= self._record["step"]:
            self._write(self._record | {"logged": _logged(trainer)})
            self._record = None

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: L.LightningModule) -> None:
        if self._file is not None and completed_batches(trainer) <= self.steps:
            self._write({"step": completed_batches(trainer), "logged": _logged(trainer)})

    on_train_epoch_end = on_validation_end  # then the averages of the epoch are there

    def _write(self, record: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def _hook(self, name: str) -> Any:
        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._record is None:
                return
            modules = self._record["modules"]
            entry = modules.setdefault(name, {"class": type(module).__name__})
            outputs = list(tensors(output))
            for key, values in (("input", tensors((args, kwargs))), ("output", outputs)):
                columns = zip(entry.get(key) or (0, 0.0, 0.0), *map(statistic, values), strict=True)
                entry[key] = [sum(column) for column in columns]
            targets = self._record["pieces"][-1]["targets"]
            for value in outputs:
                if value.requires_grad and value.ndim and not is_sharded(value):
                    value.register_hook(lambda grad: targets.update({name: _rows(grad)}))

        return record


def _logged(trainer: Trainer) -> dict[str, float]:
    """Return this rank's logged values. Ranks that differ have logged their own, unsynchronized."""
    metrics = trainer.callback_metrics.items()
    return {name: float(value) for name, value in metrics if value.numel() == 1}


def _rows(grad: Tensor) -> int:
    """Return the number of rows of a gradient that are not all zeros."""
    rows = grad.flatten(0, -2) if grad.ndim > 1 else grad[:, None]
    return int(rows.ne(0).any(dim=-1).sum())


def is_sharded(value: Tensor) -> bool:
    """Return whether a rank holds a part of the tensor, which torch names a DTensor."""
    return hasattr(value, "to_local")


def statistic(value: Tensor) -> list[float]:
    """Return count, sum of what is above zero, and sum of squares of the elements that this rank
    holds. Whatever BatchNorm normalizes by, the plain sum of its outputs is zero.
    """
    with torch.no_grad():
        local = value.to_local() if is_sharded(value) else value  # pyright: ignore[reportAttributeAccessIssue]
        numbers = torch.view_as_real(local) if local.is_complex() else local
        double = numbers.double()
        return [double.numel(), float(double.relu().sum()), float(double.square().sum())]


def _statistics(named: Mapping[str, Tensor]) -> dict[str, list[float]]:
    return {name: statistic(value) for name, value in named.items()}


def _random_state() -> bytes:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return b"".join(state.numpy().tobytes() for state in states)


def sample_digests(batch: Any) -> tuple[list[str], str]:
    """Return a digest per sample of a batch, and the shapes without the batch dim."""
    leaves = [leaf for leaf in tensors(batch) if leaf.ndim]
    sizes = [len(leaf) for leaf in leaves]
    size = max(set(sizes), key=sizes.count, default=0)
    rows = [leaf.detach().cpu().contiguous() for leaf in leaves if len(leaf) == size]
    digests = []
    for i in range(size):
        digest = hashlib.blake2b(digest_size=6)
        for leaf in rows:
            digest.update(leaf[i].reshape(-1).view(torch.uint8).numpy().tobytes())
        digests.append(digest.hexdigest())
    return digests, str([list(leaf.shape[1:]) for leaf in rows])
