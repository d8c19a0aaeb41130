"""Run tiny fp32 fits under any layout on gloo processes, and compare one run with another.

Ranks are forks of a server that has imported everything (preload.py), so a layout costs one second
instead of ten.
"""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from multiprocessing import forkserver
from pathlib import Path
from pkgutil import resolve_name as import_object
from typing import Any

import pytest

from tests import forked, needs

PRELOAD = ["tests.support.parity.preload"]
QUIET: dict[str, Any] = {  # arguments of a Trainer without logger, files and screen
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
    "num_sanity_val_steps": 0,
}


@dataclass(frozen=True)
class Run:
    """Result of one fit: loss and gradient norm per step, and the final, unsharded weights."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One fit.

    Args:
        strategy: a key of STRATEGIES, or the path of a class.
        options: arguments of the strategy.
    """

    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    steps: int = 12
    accumulate: int = 2
    global_batch: int = 32
    clip: float | None = 0.5
    clip_algorithm: str = "norm"
    precision: Any = "32-true"
    model: str = "armature.models.decoder.model.Decoder"
    model_args: dict[str, Any] = field(default_factory=lambda: dict(DECODER))
    optimizer: str = "torch.optim.AdamW"
    optimizer_args: dict[str, Any] = field(default_factory=lambda: {"lr": 3e-3, "eps": 1e-6})
    adapter: dict[str, Any] | None = None  # arguments of Lora
    ema: float | None = None
    resume: str | None = None
    save: str | None = None
    validate: bool = False
    ignore: bool = False  # ignore some targets, more in some samples than in others
    seed: int = 3


STEPS_PER_EPOCH = 100
STRATEGIES = {
    "SingleDevice": "armature.strategies.single.SingleDevice",
    "DDP": "armature.strategies.ddp.DDP",
    "MeshStrategy": "armature.strategies.mesh.MeshStrategy",
    "DeepSpeed": "armature.strategies.deepspeed.DeepSpeed",
}
DECODER = {
    "vocab_size": 96,
    "context": 16,
    "width": 32,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "ffn_hidden": 64,
}


def mesh(ranks: int, **options: Any) -> Job:
    # otherwise this model would be a single unit; sequence parallel as on GPUs
    return Job(
        "MeshStrategy", {"min_num_params": 0, "sequence_parallel": True, **options}, ranks=ranks
    )


LAYOUTS: dict[str, Job] = {
    "single": Job("SingleDevice"),
    "single, micro-batch 4": Job("SingleDevice", accumulate=4),
    "ddp 2": Job("DDP", ranks=2),
    "fsdp 2": mesh(2, shard="auto"),
    "fsdp 2, ZeRO-2": mesh(2, shard=2, reshard_after_forward=False),
    "fsdp 2, two blocks a unit": mesh(2, shard=2, min_num_params=10_000),
    "fsdp 2, one unit": mesh(2, shard=2, min_num_params=8_000_000),
    "fsdp 2, reduced once a step": mesh(2, shard=2, reduce_every_microbatch=False),
    "hsdp 2×2": mesh(4, replicate=2, shard=2),
    "tensor 2": mesh(2, tensor=2, sequence_parallel=False),
    "tensor 2, sequence parallel": mesh(2, tensor=2),
    "pipeline 2, gpipe": mesh(2, pipe=2, schedule="gpipe"),
    "pipeline 2, 1f1b": mesh(2, pipe=2, schedule="1f1b"),
    "pipeline 2, interleaved 1f1b": mesh(2, pipe=2, schedule="interleaved_1f1b"),
    "pipeline 2, zero bubble": mesh(2, pipe=2, schedule="zero_bubble"),
    "fsdp 2 × tensor 2": mesh(4, shard=2, tensor=2),
    "fsdp 2 × pipeline 2": mesh(4, shard=2, pipe=2),
    "tensor 2 × pipeline 2": mesh(4, tensor=2, pipe=2),
    "tensor 2 × pipeline 2, zero bubble": mesh(4, tensor=2, pipe=2, schedule="zero_bubble"),
    "2×2×2": mesh(8, pipe=2, shard=2, tensor=2),
    "deepspeed 1 at 2": Job("DeepSpeed", {"stage": 1}, ranks=2),
    "deepspeed 2 at 2": Job("DeepSpeed", {"stage": 2}, ranks=2),
    "deepspeed 3 at 2": Job("DeepSpeed", {"stage": 3}, ranks=2),
}


@cache
def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with pytest.MonkeyPatch.context() as patch:
        # Python 3.11 gives it neither this process's sys.path nor an error
        patch.setenv("PYTHONPATH", forked.PYTHONPATH, prepend=os.pathsep)
        forkserver.ensure_running()
    return context


def on_ranks(
    function: Callable[..., Any], *args: Any, ranks: int, timeout: float = 240.0
) -> list[Any]:
    """Call `function(*args)` on `ranks` processes that form a process group; return the results in
    order of ranks.

    Raises:
        RuntimeError: with the traceback of the rank that failed first.
    """
    context = _server()
    results, port = context.Queue(), forked.free_port()
    processes = [
        context.Process(
            target=_rank, args=(function, args, rank, ranks, port, results), daemon=True
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        gathered: dict[int, Any] = {}
        while len(gathered) < ranks:
            rank, value, error = results.get(timeout=timeout)
            if error is not None:
                raise RuntimeError(f"rank {rank} of {ranks}:\n{error}")
            gathered[rank] = value
        return [gathered[rank] for rank in range(ranks)]
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()


def _rank(
    function: Callable[..., Any], args: tuple, rank: int, ranks: int, port: int, results: Any
) -> None:
    os.environ.update(forked.joined(rank, ranks, port), DS_ACCELERATOR="cpu")
    os.dup2(2, 1)  # DeepSpeed prints to stdout
    import torch

    torch.set_num_threads(1)
    from armature.parallel import process_group

    try:
        process_group.init("gloo")
        results.put((rank, function(*args), None))
        process_group.destroy()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)


def fit(job: Job) -> Run:
    """Run a job on its own processes."""
    if job.options.get("schedule") == "zero_bubble" and needs.TORCH < (2, 12):
        needs.absent("zero bubble on CPUs needs torch 2.12")
    return on_ranks(_fit, job, ranks=job.ranks)[0]


def alone(job: Job) -> Job:
    """Return the job of one process that a job is compared with."""
    # if targets count unequally, the mean over all targets of a step
    accumulate = 1 if job.ignore else Job.accumulate
    return replace(
        job,
        strategy="SingleDevice",
        options={},
        ranks=1,
        accumulate=accumulate,
        resume=None,
        save=None,
        steps=12,
    )


_runs: dict[str, Run] = {}


def fit_once(job: Job) -> Run:
    """Return the result of a job, which is run at the first call in this process."""
    key = repr(job)
    if key not in _runs:
        _runs[key] = fit(job)
    return _runs[key]


def assert_same(job: Job, *, tolerance: float = 1e-5) -> Run:
    """Assert that a job trains, and validates, as one process does; return its run."""
    run, reference = fit_once(job), fit_once(replace(alone(job), steps=job.steps))
    far = difference(run, reference)
    if job.validate:
        far["val/loss"] = abs(run.facts["val/loss"] / reference.facts["val/loss"] - 1)
    assert max(far.values()) <= tolerance, far
    return run


def repeats(job: Job, whole: Run) -> bool:
    """Return whether a job that is saved in the middle and resumed has the same bits as its
    undisturbed run.
    """
    half = job.steps // 2
    with tempfile.TemporaryDirectory() as folder:
        fit(replace(job, steps=half, save=f"{folder}/step"))
        resumed = fit(replace(job, resume=f"{folder}/step"))
    steps = (resumed.losses, resumed.grad_norms) == (whole.losses[half:], whole.grad_norms[half:])
    return steps and all(
        (resumed.weights[name] == value).all() for name, value in whole.weights.items()
    )


def gathered_types(kind: Any, job: Job) -> list[set[Any]]:
    """Return for each rank the types of the weights that modules of a class compute with."""
    return on_ranks(_types, kind, job, ranks=job.ranks)


def _types(kind: Any, job: Job) -> set[Any]:
    seen, forward = set(), kind.forward

    def watch(self: Any, x: Any) -> Any:
        seen.add(self.weight.dtype)
        return forward(self, x)

    kind.forward = watch
    _fit(job)
    return seen


def _samples(job: Job) -> list[dict[str, Any]]:
    """Return 64 samples. Position p of the endless stream holds sample p % 64, so batches are a
    function of the step alone.
    """
    import torch

    args, generator = job.model_args, torch.Generator().manual_seed(1)

    def drawn(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, (64, *shape), generator=generator)

    if "vocab_size" in args:
        words, length = args["vocab_size"], args["context"] + 1
        start, noise = drawn(words, 1), drawn(5, length)
        ids = (start + torch.arange(length) * 3 + noise) % words
        inputs, targets = ids[:, :-1].clone(), ids[:, 1:].clone()
        for sample in range(64):
            if "classes" in args:  # texts of several lengths
                inputs[sample, length - 1 - sample * 5 % (length - 1) :] = -100
            elif job.ignore:
                targets[sample, : 16 if sample % 3 == 0 else sample * 7 % 13] = -100
    else:
        inputs = targets = torch.randn(
            64, args["channels"], *[args["image_size"]] * 2, generator=generator
        )
    if "classes" in args:
        targets = drawn(args["classes"])
    return [{"inputs": x, "targets": y} for x, y in zip(inputs, targets, strict=True)]


def _fit(job: Job) -> Run:
    import logging
    import warnings

    import lightning as L
    import torch
    from torch.utils.data import DataLoader

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    from armature.parallel.process_group import all_gather_object
    from armature.tasks.base import Task

    samples: Any = _samples(job)

    class Stream:
        """Step k holds positions [k G, (k + 1) G).

        The length is that of the whole run, wherever it starts.
        """

        def __init__(self, trainer: Any) -> None:
            self.trainer = trainer

        def __len__(self) -> int:
            return STEPS_PER_EPOCH * job.accumulate

        def __iter__(self) -> Iterator[list[int]]:
            axis = self.trainer.strategy.distributed_sampler_kwargs
            size, rank = axis["num_replicas"], axis["rank"]
            m = job.global_batch // size // job.accumulate
            for step in range(self.trainer.global_step, STEPS_PER_EPOCH):
                for j in range(job.accumulate):
                    first = step * job.global_batch + j * m * size + rank * m
                    yield [position % 64 for position in range(first, first + m)]

    class Data(L.LightningDataModule):
        trainer: Any

        def train_dataloader(self) -> DataLoader:
            return DataLoader(samples, batch_sampler=Stream(self.trainer))

        def val_dataloader(self) -> DataLoader:
            axis = self.trainer.strategy.distributed_sampler_kwargs
            return DataLoader(
                samples, sampler=range(axis["rank"], 24, axis["num_replicas"]), batch_size=4
            )

        test_dataloader = val_dataloader

    class Record(L.Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []
            self.norms: list[float] = []
            self.sum = 0.0

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            loss = outputs["loss"].detach().clone().float()
            if trainer.strategy.target_weights.batch_targets is not None:
                loss = loss * trainer.strategy.target_weights.batch_targets
            loss = trainer.strategy.reduce(loss)
            self.sum += float(loss) * trainer.accumulate_grad_batches / job.accumulate
            if (batch_idx + 1) % job.accumulate == 0:
                scale = trainer.strategy.gradient_scale()
                self.losses.append(self.sum if scale is None else self.sum * float(scale))
                self.norms.append(float(trainer.strategy.grad_norm))
                self.sum = 0.0

    strategy = import_object(STRATEGIES.get(job.strategy, job.strategy))(
        seed=job.seed, **job.options
    )
    if job.adapter is not None and job.model_args.get(
        "pretrained"
    ):  # checkpoints leave the folder's weights out
        from armature.checkpoint import state
        from armature.finetune import base

        strategy.base = base.record(Path(job.model_args["pretrained"]))
        strategy.held = state.holds(None if job.resume is None else Path(job.resume))
    record = Record()
    callbacks: list[Any] = [record]
    if job.ema is not None:
        callbacks.append(import_object("armature.callbacks.ema.EMA")(decay=job.ema))
    precision: dict[str, Any] = {"precision": job.precision}
    if job.precision == "16-mixed":  # from which Lightning would make bf16-mixed on a CPU
        precision = {
            "plugins": [
                import_object("lightning.pytorch.plugins.MixedPrecision")("16-mixed", device="cpu")
            ]
        }
    trainer = L.Trainer(
        **QUIET,
        devices=job.ranks,
        strategy=strategy,
        max_steps=job.steps,
        **precision,
        accumulate_grad_batches=job.accumulate,
        gradient_clip_val=job.clip,
        gradient_clip_algorithm=job.clip_algorithm,
        callbacks=callbacks,
        limit_val_batches=1.0 if job.validate else 0,
        val_check_interval=job.steps * job.accumulate,
    )
    task = Task(
        partial(import_object(job.model), **job.model_args),
        optimizer=lambda groups: import_object(job.optimizer)(groups, **job.optimizer_args),
        adapter=None
        if job.adapter is None
        else import_object("armature.finetune.lora.Lora")(**job.adapter),
    )
    trainer.fit(task, datamodule=Data(), ckpt_path=job.resume)
    trained = {name for name, param in task.named_parameters() if param.requires_grad}
    own = {
        name: v.to_local().numel() if hasattr(v, "to_local") else v.numel()
        for name, v in task.state_dict().items()
    }
    facts = {
        "trained": {name for names in all_gather_object(trained) for name in names},
        "val/loss": float(trainer.callback_metrics.get("val/loss", torch.tensor(float("nan")))),
        "expert_elements": sum(number for name, number in own.items() if ".experts." in name),
        "global_step": trainer.global_step,
        "bytes": _bytes(strategy),
        "scaler": strategy.precision_plugin.state_dict(),
        "load": load.tolist()
        if (load := getattr(task.model, "load_LE", None)) is not None
        else None,
    }
    if job.save is not None:
        trainer.save_checkpoint(job.save)
    weights = _whole(task, strategy)
    trainer.test(task, datamodule=Data(), verbose=False)  # as at the end of a run
    facts["test/loss"] = float(trainer.callback_metrics["test/loss"])
    return Run(record.losses, record.norms, weights, facts)


def _bytes(strategy: Any) -> int:
    """Return the bytes of this rank's weights, gradients and optimizer state."""
    import torch

    tensors = []
    for optimizer in strategy.optimizers:
        for group in optimizer.param_groups:
            tensors += [
                *group["params"],
                *(param.grad for param in group["params"] if param.grad is not None),
            ]
        tensors += [
            v
            for state in optimizer.state.values()
            for v in state.values()
            if isinstance(v, torch.Tensor)
        ]
    own = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in own)


def _whole(module: Any, strategy: Any) -> dict[str, Any]:
    """Return the unsharded weights, gathered from all ranks by name."""
    from armature.parallel.process_group import all_gather_object
    from armature.parallel.whole_weights import whole

    if hasattr(strategy, "deepspeed_engine"):
        strategy.base = None  # else what checkpoints leave out is missing
        own = strategy.lightning_module_state_dict()
    else:
        own = module.state_dict()
    merged: dict[str, Any] = {}
    for part in all_gather_object(
        {name: whole(value).detach().cpu().clone() for name, value in own.items()}
    ):
        merged |= part
    return {name: value.float().numpy() for name, value in merged.items()}


def difference(run: Run, reference: Run) -> dict[str, float]:
    """Return the largest relative differences of losses and gradient norms, and that of the final
    weights.
    """
    import numpy as np

    assert run.weights.keys() == reference.weights.keys(), (
        run.weights.keys() ^ reference.weights.keys()
    )
    # over the whole model: a bias that does not affect the loss changes by rounding noise alone
    moved = sum(
        np.square(np.float64(run.weights[name]) - value).sum()
        for name, value in reference.weights.items()
    )
    size = sum(np.square(np.float64(value)).sum() for value in reference.weights.values())

    def largest(values: list[float], others: list[float]) -> float:
        return max(abs(a - b) / abs(b) for a, b in zip(values, others, strict=True))

    return {
        "loss": largest(run.losses, reference.losses[-len(run.losses) :]),
        "grad_norm": largest(run.grad_norms, reference.grad_norms[-len(run.grad_norms) :]),
        "weights": float(np.sqrt(moved / size)),
    }
