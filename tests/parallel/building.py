"""Decoders that are sharded over the ranks of a test, without a trainer and a strategy."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from armature.models.decoder.model import Decoder
from armature.models.decoder.plan import PLAN
from armature.models.plan import Plan
from armature.parallel import apply, mesh
from armature.parallel.context import Positions
from armature.parallel.split import SCHEDULES


def decoder_on_meta(**arguments: Any) -> Decoder:
    with torch.device("meta"):
        return Decoder(**arguments)


def options(**changes: Any) -> apply.Options:
    defaults = {
        "seed": 0,
        "schedule": SCHEDULES["1f1b"],
        "microbatches": 1,
        "stages": None,
        "sequence_parallel": True,
        "activation_checkpointing": "none",
        "compile": "none",
        "reshard_after_forward": True,
        "param_dtype": None,
        "reduce_dtype": None,
        "cpu_offload": False,
        "prefetch": 1,
        "min_num_params": 0,
    }
    return apply.Options(**defaults | changes)


def parallelize(
    model: nn.Module,
    *,
    axes: dict[str, int],
    prefix: str = "model.",
    imported: Collection[str] = (),
    plan: Plan | None = PLAN,
    listed: bool = False,
    **changes: Any,
) -> DeviceMesh:
    """Parallelize a model on CPUs, over the axes given and with `options(**changes)`; return the
    mesh.
    """
    sizes = dict.fromkeys(mesh.AXES, 1) | axes
    built, context = mesh.build(sizes, device_type="cpu"), sizes["context"]
    positions = Positions(mesh.context_group(built, context=context)) if context > 1 else None
    apply.parallelize(
        model,
        plan,
        built,
        options(**changes),
        device=torch.device("cpu"),
        prefix=prefix,
        imported=imported,
        positions=positions,
        listed=listed,
    )
    return built
