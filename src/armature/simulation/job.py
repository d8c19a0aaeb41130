"""One rank of a run in this process, which ends afterwards: it has replaced functions of torch,
Lightning and ours.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import lightning.pytorch as L
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from armature import worker
from armature.errors import ConfigError
from armature.finetune import check as pretrained
from armature.layout import Layout
from armature.parallel import dtensors
from armature.planner import memory
from armature.planner.devices import Device
from armature.simulation import deepspeed, fake_cuda, hooks, operators, order, settings, substitutes
from armature.simulation.meter import Assumed, Meter
from armature.simulation.probe import Probe, StepEnded, Validation
from armature.simulation.report import Report, Volume
from armature.simulation.roofline import Roofline
from armature.strategies.base import StrategyMixin
from armature.training import flops, process
from armature.training.stop import StopOnSignal
from armature.validation import checks

MICRO_BATCHES = 3  # of a step that are simulated: the first, one of the middle, and the last
VALIDATED = 2  # batches, before the training step, if the order of communication is recorded


def record(cfg: DictConfig, *, rank: int, device: Device) -> dict[str, Any]:
    """Return `processes.Recorded` as JSON."""
    recorder = order.Recorder()
    report = run(cfg, rank=rank, device=device, recorder=recorder)
    issued = [asdict(each) for each in recorder.record]
    return {
        "report": report.to_dict(),
        "record": issued,
        "validation_syncs": recorder.validation_syncs,
    }


def run(
    cfg: DictConfig,
    *,
    rank: int,
    device: Device,
    expert_load: float = 1.0,
    recorder: order.Recorder | None = None,
) -> Report:
    """Simulate one rank of a composed configuration.

    Raises ConfigError, and whatever the run raises.
    """
    with tempfile.TemporaryDirectory(
        prefix="armature-simulation-", ignore_cleanup_errors=True
    ) as folder:
        return _run(
            cfg, Path(folder), rank=rank, device=device, expert_load=expert_load, recorder=recorder
        )


def _run(
    cfg: DictConfig,
    folder: Path,
    *,
    rank: int,
    device: Device,
    expert_load: float,
    recorder: order.Recorder | None,
) -> Report:
    world_size = _world_size(cfg, device)
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank}: the run has ranks 0 to {world_size - 1}.")
    assert device.capability is not None  # a GPU's, since others are refused
    substitutes.install(devices=cfg.trainer.devices, capability=device.capability)
    fake_cuda.present(
        fake_cuda.Device(
            name=f"NVIDIA {device.name.upper().replace('_', ' ')}",
            memory_bytes=device.memory_bytes,
            capability=device.capability,
            processors=device.processors,
            count=cfg.trainer.devices,
        )
    )
    cfg = pretrained.fill(cfg)
    notes = settings.simplify(cfg, root=str(folder))
    (folder / cfg.run.name / "logs").mkdir(parents=True)
    cfg = checks.check(cfg)
    cfg.run.dir = f"{cfg.run.root}/{cfg.run.name}"
    layout = Layout.of(cfg)
    if layout.kind == "deepspeed":
        return deepspeed.report(
            cfg,
            layout,
            rank=rank,
            device=device,
            simulate=lambda single, shares: _simulate(
                single, rank=0, device=device, notes=notes, shares=shares
            ),
        )
    if layout.axes["pipe"] > 1:
        stage_0 = rank % (world_size // layout.axes["pipe"])  # the pipe axis is the outermost
        boundary = _in_child(lambda: _boundary(cfg, rank=stage_0, device=device))
        substitutes.pipeline(boundary)
        notes.append(
            "All stages of the pipeline are taken to send tensors of one shape, as those of equal "
            "blocks do."
        )
    if layout.kind != "single":
        _join(rank, world_size=world_size, devices=cfg.trainer.devices)
    if settings.experts_travel(layout):
        notes.append("All experts are taken to get equally many tokens, if nothing else is said.")
    return _simulate(
        cfg, rank=rank, device=device, notes=notes, expert_load=expert_load, recorder=recorder
    )


def _join(rank: int, *, world_size: int, devices: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank % devices),
        "LOCAL_WORLD_SIZE": str(devices), "GROUP_RANK": str(rank // devices),
    }  # fmt: skip


def _boundary(cfg: DictConfig, *, rank: int, device: Device) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of what the first stage of a pipeline sends, which only a simulation
    of it knows.
    """
    substitutes.pipeline(None)
    _join(rank, world_size=Layout.of(cfg).world_size, devices=cfg.trainer.devices)
    try:
        _simulate(cfg, rank=rank, device=device, notes=[])
    except substitutes.BoundaryFound as found:
        return found.shape, found.dtype
    raise AssertionError("the first stage has sent nothing")


class ChildFailed(Exception):
    """The simulation of the first stage raised an error. The text is its traceback."""


def _in_child(function: Callable[[], Any]) -> Any:
    """Return what a function returns in a process of its own, since it replaces functions of
    torch.
    """
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            result = pickle.dumps(function())
        except ConfigError as error:
            result = pickle.dumps(error)
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            result = pickle.dumps(operators.explained(error) or ChildFailed(text))
        os.write(write, result)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        result = pickle.loads(pipe.read())
    os.waitpid(child, 0)
    if isinstance(result, Exception):
        raise result
    return result


def _world_size(cfg: DictConfig, device: Device) -> int:
    cfg.trainer.accelerator = "gpu"
    if cfg.trainer.devices == "auto":
        cfg.trainer.devices = device.devices_per_machine
    return cfg.trainer.devices * cfg.trainer.num_nodes


def _simulate(
    cfg: DictConfig,
    *,
    rank: int,
    device: Device,
    notes: list[str],
    recorder: order.Recorder | None = None,
    shares: Mapping[str, float] | None = None,
    expert_load: float = 1.0,
) -> Report:
    layout = Layout.of(cfg)
    tf32 = cfg.trainer.matmul_precision != "highest"
    meter = Meter(layout.axes, Roofline(device=device, rank=rank, tf32=tf32))
    meter.shares = shares or {}
    hooks.install(meter)
    operators.install(meter)
    substitutes.experts_load(meter, load=expert_load)
    process.quiet()
    torch.set_float32_matmul_precision(cfg.trainer.matmul_precision)
    adapter_build = worker.users_feed.build

    def build_data(cfg: DictConfig) -> Any:
        data = hooks.with_values(adapter_build)(cfg)
        substitutes.data_module(data)
        data.global_batch_size = _few_micro_batches(data, layout)
        return data

    worker.users_feed.build = build_data
    dtensors.WATCHED_FORWARDS = 0  # whose sums are of the first steps alone
    stop = StopOnSignal(max_seconds=None, deadline=None)
    with ExitStack() as modes:
        modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        modes.enter_context(meter)
        L.seed_everything(cfg.seed, workers=True, verbose=False)
        run = worker.build(cfg, stop)
        if recorder is not None:
            run.trainer.num_sanity_val_steps = VALIDATED
            run.trainer.callbacks.append(Validation(meter, recorder))  # pyright: ignore[reportAttributeAccessIssue]
            modes.enter_context(recorder)
        pipeline = layout.axes["pipe"] > 1
        probe = Probe(meter, logits=_logits_sizes(cfg, layout), steps_before=int(pipeline))
        run.trainer.callbacks.insert(0, probe)  # pyright: ignore[reportAttributeAccessIssue]
        run.trainer.fit_loop.epoch_loop.step_ended.insert(0, probe.step_ended)
        try:
            run.trainer.fit(run.task, datamodule=run.data)
        except StepEnded:
            pass
        except Exception as error:
            _note_answers(error, meter)
            raise
    if probe.result is None:
        raise ConfigError("The run ended before its first optimizer step: nothing was simulated.")
    report = _report(cfg, run, meter, probe, rank=rank, device=device, layout=layout, notes=notes)
    return replace(report, expert_load=expert_load)


def _note_answers(error: Exception, meter: Meter) -> None:
    """Say with an error which lines read values before it, since it may follow from what they were
    answered.
    """
    if meter.answered:
        error.add_note(
            "Fake tensors have no values: 1.0, 0 or False was read instead by "
            f"{', '.join(list(meter.answered)[-3:])}. The error may follow from that."
        )


def _few_micro_batches(data: Any, layout: Layout) -> int:
    """Return a global batch of at most MICRO_BATCHES micro-batches; the others of a step are like
    the middle one.
    """
    micro = data.micro_batch_size
    data.simulated_of = data.global_batch_size
    if not isinstance(micro, int):
        return data.global_batch_size
    return min(data.global_batch_size, micro * layout.data_ranks * MICRO_BATCHES)


def _logits_sizes(cfg: DictConfig, layout: Layout) -> frozenset[int]:
    """Return the sizes of the dimension along which a language model's vocabulary lies, whole and
    on one rank.
    """
    size = (cfg.model or {}).get("vocab_size")
    return frozenset() if not size else frozenset({size, math.ceil(size / layout.axes["tensor"])})


def _with_repeats(probe: Probe, repeats: int) -> dict[str, Any]:
    """Return the counts of a step in which the middle micro-batch comes `repeats` more times."""
    assert probe.result is not None
    if not repeats or len(probe.batches) < 2:
        return probe.result
    first, second = probe.batches[0], probe.batches[1]

    def more(total: Any, before: Any, after: Any) -> Any:
        if isinstance(total, dict):
            return {
                key: more(total[key], (before or {}).get(key), (after or {}).get(key))
                for key in total
            }
        if isinstance(total, tuple):
            before, after = before or (0.0,) * len(total), after or (0.0,) * len(total)
            return tuple(
                t + (a - b) * repeats for t, b, a in zip(total, before, after, strict=True)
            )
        return total + ((after or 0) - (before or 0)) * repeats

    return {key: more(probe.result[key], first[key], second[key]) for key in probe.result}


def _report(
    cfg: DictConfig,
    run: worker.Run,
    meter: Meter,
    probe: Probe,
    *,
    rank: int,
    device: Device,
    layout: Layout,
    notes: list[str],
) -> Report:
    strategy: Any = StrategyMixin.find(run.trainer) or run.trainer.strategy
    data, world_size = run.feed, layout.world_size
    repeats = (data.simulated_of - data.global_batch_size) // max(
        1, _micro(data, layout) * layout.data_ranks
    )
    counted = _with_repeats(probe, repeats)
    return Report(
        rank=rank,
        world_size=world_size,
        axes=dict(layout.axes) if layout.kind == "mesh" else {"data": world_size},
        hardware=device.name,
        parameters=getattr(strategy, "parameter_count", 0),
        held=probe.held,
        peak=meter.peak,
        peak_by_kind={kind: size for kind, size in meter.peak_by_kind.items() if size},
        peak_by_phase=meter.peak_by_phase,
        peak_at=meter.peak_at,
        allowance=memory.allowance_bytes(meter.peak, ranks=world_size),
        capacity=device.memory_bytes,
        flops=counted["flops"],
        operators=counted["operators"],
        volumes=[
            Volume(axis=axis, kind=kind, ranks=ranks, calls=calls, bytes=size, seconds=seconds)
            for (axis, kind, ranks), (calls, size, seconds) in sorted(counted["volumes"].items())
        ],
        syncs=counted["syncs"],
        compute_seconds=counted["seconds"],
        bubble_share=getattr(strategy, "bubble_share", 0.0),
        samples_per_step=data.simulated_of,
        tokens_per_sample=data.tokens_per_sample,
        model_flops=_model_flops(run, probe),
        peak_flops=meter.roofline.peak(_compute_type(str(cfg.trainer.precision))),
        notes=(*notes, *_assumptions(meter)),
    )


def _compute_type(precision: str) -> torch.dtype:
    """Return the type of the matrix products, whose rate MFU is a share of.

    V100 and T4 have none of bf16.
    """
    if precision.startswith("64"):
        return torch.float64
    return (
        torch.bfloat16
        if "bf16" in precision
        else torch.float16
        if "16" in precision
        else torch.float32
    )


def _assumptions(meter: Meter) -> list[str]:
    lines = {
        taken: [line for line, each in meter.assumed.items() if each == taken]
        for taken in get_args(Assumed)
    }
    consequences = {
        "largest": "at most what is printed",
        "smallest": "at least what is printed, and may be higher",
    }
    return [
        f"The size of a result depends on values ({', '.join(found)}): the {taken} possible is "
        "taken, so the peak is "
        f"{consequences[taken]}."
        for taken, found in lines.items()
        if found
    ]


def _micro(data: Any, layout: Layout) -> int:
    micro = data.micro_batch_size
    return micro if isinstance(micro, int) else data.global_batch_size // layout.data_ranks


def _model_flops(run: worker.Run, probe: Probe) -> float | None:
    make: Callable[[], Any] | None = getattr(run.task, "_make_model", None)
    batch = probe.first_batch
    if make is None or not isinstance(batch, dict) or "inputs" not in batch:
        return None
    shapes = {
        key: torch.empty(batch[key].shape, dtype=batch[key].dtype, device="meta") for key in batch
    }
    found = flops.flops_per_sample(make, shapes["inputs"], shapes.get("targets"))
    return None if found is None else found * run.feed.simulated_of
