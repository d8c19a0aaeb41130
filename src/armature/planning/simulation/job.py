"""One rank of a run in this process, which ends afterwards: it has replaced functions of torch,
Lightning and ours.
"""

# pyright: reportPrivateImportUsage=false
import math
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

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
from armature.planning import memory
from armature.planning.devices import Device
from armature.planning.roofline import Roofline
from armature.planning.seconds import compute_type
from armature.planning.simulation import hooks, operators, order, settings, substitutes
from armature.planning.simulation.meter import Meter
from armature.planning.simulation.probe import HELD, Probe, StepEnded
from armature.planning.simulation.processes import Boundary, Request, SimulationFailed
from armature.planning.simulation.report import Report, Volume, weighted
from armature.strategies.base import StrategyMixin
from armature.training import flops, process
from armature.training.stop import StopOnSignal

MICRO_BATCHES = 3  # of a step that are simulated: the first, one of the middle, and the last
VALIDATED = 2  # batches, before the training step, if the order of communication is recorded


def answer(request: Request) -> Report | Boundary | ConfigError | SimulationFailed:
    """Simulate one rank. Return what is wrong in place of a report."""
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="armature-simulation-") as folder:
            return _run(request, Path(folder))
    except substitutes.BoundaryFound as found:
        return found.boundary
    except ConfigError as error:
        return error
    except Exception:
        return SimulationFailed(traceback.format_exc())


def _run(request: Request, folder: Path) -> Report:
    cfg, rank, device = pretrained.fill(request.cfg), request.rank, request.device
    count, world_size = cfg.trainer.devices, cfg.trainer.devices * cfg.trainer.num_nodes
    cfg, notes = settings.checked(cfg, device, root=str(folder))
    (folder / cfg.run.name / "logs").mkdir(parents=True)
    cfg.run.dir = f"{cfg.run.root}/{cfg.run.name}"
    layout = Layout.of(cfg)
    cfg.trainer.accelerator = "cpu"  # whose fake tensors stand for those of a GPU
    shares = dict.fromkeys(HELD, 0.0) if layout.options.get("cpu_offload") else {}
    if shares:
        cfg.strategy.cpu_offload = False
    substitutes.install(device)
    # what stages send is found in a training step, without a validation before it
    finds_boundary = layout.axes["pipe"] > 1 and request.boundary is None
    if layout.axes["pipe"] > 1:
        substitutes.pipeline(request.boundary)
        if finds_boundary:
            rank %= world_size // layout.axes["pipe"]  # the pipe axis is the outermost
        notes.append(
            "All stages of the pipeline are taken to send tensors of one shape, as those of equal "
            "blocks do."
        )
    if layout.kind != "single":
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank % count),
            "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": str(rank // count),
        }  # fmt: skip
    if settings.experts_travel(layout):
        notes.append("All experts are taken to get equally many tokens.")
    record = request.record and not finds_boundary
    return _simulate(cfg, device, rank=rank, notes=notes, record=record, shares=shares)


def _simulate(
    cfg: DictConfig,
    device: Device,
    *,
    rank: int,
    notes: list[str],
    record: bool,
    shares: Mapping[str, float],
) -> Report:
    layout, issued = Layout.of(cfg), []
    tf32 = cfg.trainer.matmul_precision != "highest"
    meter = Meter(layout.axes, Roofline(device=device, rank=rank, tf32=tf32))
    meter.shares = shares
    hooks.install(meter)
    operators.install(meter)
    substitutes.experts_load(meter)
    process.quiet()
    torch.set_float32_matmul_precision(cfg.trainer.matmul_precision)
    build_feed = worker.feed.build

    def build_small(cfg: DictConfig) -> Any:
        feed = hooks.with_values(build_feed)(cfg)
        substitutes.feed(feed)
        # the others of a step are like the middle one
        few = _micro(feed, layout) * layout.data_ranks * MICRO_BATCHES
        feed.simulated_of = feed.global_batch_size
        feed.global_batch_size = min(feed.global_batch_size, few)
        return feed

    worker.feed.build = build_small
    stop = StopOnSignal(max_seconds=None, deadline=None)
    with ExitStack() as modes:
        mode = modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        substitutes.batches(mode)
        modes.enter_context(meter)
        L.seed_everything(cfg.seed, workers=True, verbose=False)
        run = worker.build(cfg, stop)
        pipeline, logits = layout.axes["pipe"] > 1, _logits_sizes(cfg, layout)
        if record:
            issued = order.Recorder(meter).record
            # a classifier's outputs come from the last stage: other ranks do not know their shape
            run.trainer.num_sanity_val_steps = VALIDATED if logits or not pipeline else 0
        probe = Probe(meter, logits=logits, steps_before=int(pipeline))
        run.trainer.callbacks.insert(0, probe)  # pyright: ignore[reportAttributeAccessIssue]
        with suppress(StepEnded):
            run.trainer.fit(run.task, datamodule=run.feed.data)
    if probe.result is None:
        raise ConfigError("The run ended before its first optimizer step: nothing was simulated.")
    return _report(
        cfg, run, meter, probe, rank=rank, device=device, layout=layout, notes=notes, issued=issued
    )


def _logits_sizes(cfg: DictConfig, layout: Layout) -> frozenset[int]:
    """Return the sizes of the dimension along which a language model's vocabulary lies, whole and
    on one rank.
    """
    size = (cfg.model or {}).get("vocab_size")
    return frozenset({size, math.ceil(size / layout.axes["tensor"])} if size else ())


def _with_repeats(probe: Probe, repeats: int) -> dict[str, Any]:
    """Return the counts of a step in which the middle micro-batch comes `repeats` more times."""
    assert probe.result is not None
    if not repeats or len(probe.batches) < 2:
        return probe.result
    first, second = probe.batches[0], probe.batches[1]
    return weighted((1, probe.result), (-repeats, first), (repeats, second))


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
    issued: order.Record,
) -> Report:
    strategy: Any = StrategyMixin.of(run.trainer)
    data: Any = run.feed
    world_size = layout.world_size
    left_out = data.simulated_of - data.global_batch_size
    counted = _with_repeats(probe, left_out // (_micro(data, layout) * layout.data_ranks))
    return Report(
        rank=rank,
        world_size=world_size,
        axes=dict(layout.axes) if layout.kind == "mesh" else {"data": world_size},
        hardware=device.name,
        parameters=getattr(strategy, "parameter_count", 0),
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
        tokens_per_sample=data.assets.tokens_per_sample,
        model_flops=_model_flops(run.task, probe, data.simulated_of),
        peak_flops=meter.roofline.peak(compute_type(str(cfg.trainer.precision))),
        notes=(*notes, *_assumptions(meter)),
        issued=issued,
        validation_syncs=probe.validation_syncs,
    )


def _assumptions(meter: Meter) -> list[str]:
    if not meter.assumed:
        return []
    return [
        f"The size of a result depends on values ({', '.join(meter.assumed)}): the largest "
        "possible is taken, so the peak is at most what is printed."
    ]


def _micro(data: Any, layout: Layout) -> int:
    micro = data.micro_batch_size
    return micro if isinstance(micro, int) else data.global_batch_size // layout.data_ranks


def _model_flops(task: Any, probe: Probe, samples: int) -> float | None:
    make: Callable[[], Any] | None = getattr(task, "_make_model", None)
    batch = probe.first_batch
    if make is None or not isinstance(batch, dict) or "inputs" not in batch:
        return None
    shapes = {
        key: torch.empty(batch[key].shape, dtype=batch[key].dtype, device="meta") for key in batch
    }
    found = flops.flops_per_sample(make, shapes["inputs"], shapes.get("targets"))
    return None if found is None else found * samples
