"""What the expert axis and mixtures of experts cannot be combined with. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from armature.layout import Layout
from armature.parallel import mesh
from armature.validation import signatures


def shards_sequence(cfg: Mapping[str, Any], layout: Layout) -> bool:
    """Return whether the tensor axis of a mesh shards positions too."""
    option, expert = layout.options["sequence_parallel"], layout.options["expert"]
    return mesh.shards_sequence(option, device=cfg["trainer"]["accelerator"], expert=expert)


def problems(cfg: Mapping[str, Any], layout: Layout) -> list[str]:
    """Return why a mixture of experts cannot be trained by this strategy, or this model over an
    expert axis.
    """
    plan, options = layout.plan, layout.options
    has_experts = plan is not None and plan.experts is not None
    expert = options["expert"] if layout.kind == "mesh" else 1
    if expert > 1 and plan is None and not signatures.accepted(cfg["task"], ["model"]):
        return []  # the module builds its own model: `parallel.apply` finds whether it has experts
    if expert > 1 and not has_experts:
        model = cfg["model"]["_target_"].rpartition(".")[2]
        return [
            f"strategy.expert={expert}: {model} has no experts. Type strategy.expert=1, or a "
            "mixture such as model=mixture_nano."
        ]
    if plan is None or not has_experts:
        return []
    found = []
    if layout.kind == "mesh" and (problem := mesh.expert_problem(expert, layout.axes)) is not None:
        found.append(problem)
    count = cfg["model"].get(plan.expert_count)
    if isinstance(count, int) and count % expert:
        fits = [n for n in range(1, min(expert, count + 1)) if count % n == 0]
        found.append(
            f"strategy.expert={expert} does not divide model.{plan.expert_count}={count}. Type "
            f"strategy.expert={max(fits)}, or "
            f"model.{plan.expert_count}={-(-count // expert) * expert}."
        )
    found += _uneven(cfg, layout, expert=expert, count=count)
    if layout.axes["tensor"] > 1 and not shards_sequence(cfg, layout):
        found.append(
            f"strategy.tensor={layout.axes['tensor']} with "
            f"strategy.sequence_parallel={options['sequence_parallel']}: each rank would send the "
            "same tokens to the experts. Type strategy.sequence_parallel=true."
        )
    # experts are on ranks of their own
    meshed = layout.kind == "mesh" and (expert > 1 or layout.axes["tensor"] > 1)
    if meshed and options["cpu_offload"]:
        found.append(
            f"strategy.cpu_offload=true with {_axes(expert, layout)} has not been tried for a "
            "mixture of experts. Type strategy.cpu_offload=false, or strategy=fsdp."
        )
    key, reduced = _reduced(cfg, options) if meshed else ("", "float32")
    if reduced not in ("float32", "bfloat16"):
        found.append(
            f"{key} with {_axes(expert, layout)} would reduce gradients in {reduced} and divide "
            "those of experts "
            "twice. Type strategy.reduce_dtype=float32, or strategy.reduce_dtype=bfloat16."
        )
    if expert > 1 and options["compile"] != "none" and cfg["trainer"]["accelerator"] != "cpu":
        found.append(
            f"strategy.compile={options['compile']} with strategy.expert={expert} has not been "
            "tried on GPUs. Type strategy.compile=none."
        )
    if options["float8"]:
        found.append(
            f"strategy.float8={str(options['float8']).lower()} converts Linears, and a mixture's "
            "experts are none. Type strategy.float8=false."
        )
    return found


def _reduced(cfg: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[str, str]:
    """Return what decides the type in which gradients are reduced, and the type. torch divides most
    of them itself.
    """
    precision = cfg["trainer"]["precision"]
    for key in ("reduce_dtype", "param_dtype"):
        if options[key] is not None:
            return f"strategy.{key}={options[key]}", options[key]
        if precision in mesh.GATHERED_IN:
            break  # they are reduced in fp32 unless reduce_dtype is typed
    own = {"16-true": "float16", "64-true": "float64"}
    return f"trainer.precision={precision}", own.get(precision, "float32")


def _axes(expert: int, layout: Layout) -> str:
    return f"strategy.expert={expert}" if expert > 1 else f"strategy.tensor={layout.axes['tensor']}"


def _uneven(cfg: Mapping[str, Any], layout: Layout, *, expert: int, count: Any) -> list[str]:
    """Where experts are not whole on their ranks, FSDP2 cuts their matrices, in equal parts
    only.
    """
    ranks = math.prod(
        size for axis, size in layout.axes.items() if axis not in ("pipe", "replicate")
    )
    meshed = expert > 1 or layout.axes["tensor"] > 1
    if (
        not meshed
        or ranks % expert
        or not isinstance(count, int)
        or count % expert
        or count % ranks == 0
    ):
        return []
    assert layout.plan is not None
    rest, fitting = ranks // expert, -(-count // ranks) * ranks
    return [
        f"strategy.expert={expert} on {ranks} ranks cuts each expert over {rest} of them, which do "
        f"not divide model.{key}={cfg['model'][key]}. Type "
        f"model.{layout.plan.expert_count}={fitting}, or another trainer.devices."
        for key in ("expert_hidden", "width")
        if isinstance(cfg["model"].get(key), int) and cfg["model"][key] % rest
    ]
