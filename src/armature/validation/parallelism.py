"""What a strategy cannot do, found before a process starts. Torch-free.

`REFUSED` is the whole of it that is a matter of features: a test walks it cell by cell.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from armature import hardware
from armature.models.plan import Plan
from armature.parallel import mesh
from armature.parallel.split import SCHEDULES

KINDS = ("single", "ddp", "shard", "tensor", "pipeline", "deepspeed", "zero3")
FEATURES = (
    "32-true", "bf16-mixed", "bf16-true", "16-mixed", "compile=block", "compile=model", "clip=norm", "clip=value",
    "activation_checkpointing=every", "activation_checkpointing=selective", "ema", "muon", "float8",
)  # fmt: skip
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")
FLOAT8_FROM = (8, 9)
GRAPHS = ("reduce-overhead", "max-autotune")  # modes that record CUDA graphs
_TARGETS = {"SingleDevice": "single", "DDP": "ddp", "DeepSpeed": "deepspeed", "DataParallel": "dp"}

# (feature, kind of strategy) → why not, and what to type instead. What is not here works, and is tested.
REFUSED: dict[tuple[str, str], str] = {
    (
        "16-mixed",
        "shard",
    ): "torch's loss scaler does not see the other ranks' overflows. Type trainer.precision=bf16-mixed",
    (
        "16-mixed",
        "tensor",
    ): "torch's loss scaler does not see the other ranks' overflows. Type trainer.precision=bf16-mixed",
    ("16-mixed", "pipeline"): "gradients are made before the loss could be scaled. Type trainer.precision=bf16-mixed",
    ("compile=model", "shard"): "sharding gathers weights block by block. Type strategy.compile=block",
    ("compile=model", "tensor"): "its collectives stand between the blocks. Type strategy.compile=block",
    ("compile=model", "pipeline"): "a stage holds only some blocks. Type strategy.compile=block",
    ("compile=model", "deepspeed"): "its hooks stand between the blocks. Type strategy.compile=block",
    ("compile=block", "tensor"): "compiled blocks lose the layout of gradients there. Type strategy.compile=none",
    ("ema", "zero3"): "its weights are in pieces that have no names. Type strategy=fsdp, or leave the average out",
    ("muon", "deepspeed"): "its engine flattens matrices, which Muon needs whole. Type optimizer=adamw",
    ("clip=value", "deepspeed"): "its engine clips by norm only. Type trainer.gradient_clip_algorithm=norm",
    ("float8", "tensor"): "torchao does not know this division of matrices. Type strategy.float8=false",
}


def kind(strategy: Mapping[str, Any], *, world_size: int) -> str:
    """`single`, `ddp`, `mesh`, `deepspeed`, `dp`, or `other` for a class of the user's own."""
    name = str(strategy.get("_target_", "")).rpartition(".")[2]
    if name == "auto":
        return "single" if world_size == 1 else "ddp"
    return "mesh" if name == "MeshStrategy" else _TARGETS.get(name, "other")


def axes(strategy: Mapping[str, Any], *, world_size: int) -> dict[str, int] | None:
    """The sizes of a mesh's axes; None for other strategies, and where the sizes do not make sense."""
    if kind(strategy, world_size=world_size) != "mesh":
        return None
    try:
        return mesh.resolve({axis: strategy[axis] for axis in mesh.AXES}, world_size=world_size)
    except ValueError:
        return None


def data_size(strategy: Mapping[str, Any], world_size: int) -> int:
    """Ranks that see different samples; the number of processes where the axes do not make sense."""
    sizes = axes(strategy, world_size=world_size)
    return world_size if sizes is None else sizes["replicate"] * sizes["shard"]


def kinds_in_use(strategy: Mapping[str, Any], *, world_size: int) -> list[str]:
    """Which columns of `REFUSED` hold for a strategy: a mesh has one for each axis that is longer than 1."""
    found = kind(strategy, world_size=world_size)
    if found == "deepspeed":
        return ["deepspeed", "zero3"] if strategy.get("stage") == 3 else ["deepspeed"]
    if found != "mesh":
        return [found]
    sizes = mesh.resolve({axis: strategy[axis] for axis in mesh.AXES}, world_size=world_size)
    used = {
        "shard": sizes["shard"] * sizes["replicate"] > 1,
        "tensor": sizes["tensor"] > 1,
        "pipeline": sizes["pipe"] > 1,
    }
    return [name for name, on in used.items() if on] or ["shard"]


def problems(cfg: Mapping[str, Any], *, world_size: int, plan: Plan | None) -> list[str]:
    """Everything about the layout that would fail, each with what to type instead.

    Args:
        cfg: the whole configuration, resolved, as plain types.
        plan: the plan beside the model; None where it has none.
    """
    strategy = cfg["strategy"]
    found = kind(strategy, world_size=world_size)
    if found == "dp":
        return [
            "strategy=dp: torch.nn.DataParallel is not offered. It runs one Python process for all devices, copies the "
            "weights to each of them in every step and gathers all outputs on the first, so it is slower than one "
            "process a device and cannot cross machines. Type strategy=ddp trainer.devices=N, which computes the same."
        ]
    if found == "other":
        return []
    if found == "single" and world_size > 1:
        return [f"strategy=single is one process, but there are {world_size}. Type strategy=ddp, or trainer.devices=1."]
    if found == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        return ["strategy=deepspeed: deepspeed is not installed here. Type pip install deepspeed, or strategy=fsdp."]
    context = Context(cfg=cfg, strategy=strategy, world_size=world_size, plan=plan)
    if found == "mesh":
        try:
            context.sizes.update(mesh.resolve({axis: strategy[axis] for axis in mesh.AXES}, world_size=world_size))
        except ValueError as error:
            return [str(error)]
    return [problem for rule in RULES for problem in rule(context)]


@dataclass
class Context:
    """What the rules look at."""

    cfg: Mapping[str, Any]
    strategy: Mapping[str, Any]
    world_size: int
    plan: Plan | None
    sizes: dict[str, int] = None  # pyright: ignore[reportAssignmentType]

    def __post_init__(self) -> None:
        self.sizes = dict.fromkeys(mesh.AXES, 1)

    @property
    def model(self) -> Mapping[str, Any]:
        return self.cfg["model"]


def _refused(context: Context) -> list[str]:
    trainer, strategy = context.cfg["trainer"], context.strategy
    features = [str(trainer["precision"]), f"compile={strategy.get('compile', 'none')}"]
    targets = [str(node.get("_target_")) for node in (context.cfg.get("callbacks") or {}).values() if node]
    if "armature.callbacks.ema.EMA" in targets:
        features.append("ema")
    if str(context.cfg["optimizer"].get("_target_")).endswith(".Muon"):
        features.append("muon")
    if strategy.get("float8"):
        features.append("float8")
    if trainer["gradient_clip_val"]:
        features.append(f"clip={trainer['gradient_clip_algorithm']}")
    return [
        f"{feature} does not work with this strategy ({name}): {REFUSED[feature, name]}."
        for name in kinds_in_use(strategy, world_size=context.world_size)
        for feature in features
        if (feature, name) in REFUSED
    ]


def _precision(context: Context) -> list[str]:
    if context.cfg["trainer"]["precision"] == "16-mixed" and context.cfg["trainer"]["accelerator"] == "cpu":
        return ["trainer.precision=16-mixed needs a GPU. Type trainer.precision=bf16-mixed, or 32-true."]
    return []


def _compile(context: Context) -> list[str]:
    strategy, mode = context.strategy, context.strategy.get("compile_mode", "default")
    if mode not in COMPILE_MODES:
        return [f"strategy.compile_mode={mode}: must be one of {', '.join(COMPILE_MODES)}."]
    if mode != "default" and strategy.get("compile", "none") == "none":
        return [f"strategy.compile_mode={mode}: nothing is compiled. Type strategy.compile=block with it."]
    others = set(kinds_in_use(strategy, world_size=context.world_size)) - {"single", "ddp"}
    if mode in GRAPHS and others:
        return [
            f"strategy.compile_mode={mode} does not work with this strategy ({', '.join(sorted(others))}): a CUDA "
            "graph reads weights where they were when it was recorded, and here they come to another place in each "
            "step. Type strategy.compile_mode=max-autotune-no-cudagraphs, or strategy=ddp."
        ]
    return []


def _float8(context: Context) -> list[str]:
    asked, trainer = context.strategy.get("float8", False), context.cfg["trainer"]
    if asked is False:
        return []
    if asked is not True and asked != "emulate":
        return [f"strategy.float8={asked}: must be false, true, or emulate."]
    problems = []
    if importlib.util.find_spec("torchao") is None:
        problems.append("strategy.float8 is torchao's, which is not installed here. Type pip install torchao.")
    if context.plan is None:
        problems.append(
            f"strategy.float8={str(asked).lower()}: {context.model.get('_target_')} has no plan, which names the "
            "blocks that can take it. Write PLAN in a plan.py beside the model's module, or type strategy.float8=false."
        )
    if asked == "emulate":
        return problems
    if trainer["accelerator"] != "gpu":
        problems.append(
            f"strategy.float8=true: trainer.accelerator={trainer['accelerator']} does not multiply in float8. Type "
            "strategy.float8=false, or strategy.float8=emulate to see what it would do to the loss (slowly)."
        )
    elif (capability := hardware.compute_capability()) is not None and capability < FLOAT8_FROM:
        problems.append(
            f"strategy.float8=true needs a GPU of compute capability {'.'.join(map(str, FLOAT8_FROM))} (Ada, Hopper "
            f"and later); this one has {'.'.join(map(str, capability))}. Type strategy.float8=false."
        )
    if not str(trainer["precision"]).startswith("bf16"):
        problems.append(
            f"strategy.float8=true with trainer.precision={trainer['precision']}: what is not in float8 should be in "
            "bf16. Type trainer.precision=bf16-mixed, or strategy.float8=false."
        )
    return problems


def _plan(context: Context) -> list[str]:
    used = [axis for axis in ("tensor", "pipe") if context.sizes[axis] > 1]
    if used and context.plan is None:
        axes = " and ".join(f"strategy.{axis}={context.sizes[axis]}" for axis in used)
        return [
            f"{axes}: {context.model.get('_target_')} has no plan, which says how it may be divided. Write PLAN in a "
            "plan.py beside the model's module, or type strategy=fsdp or strategy=ddp, which need none."
        ]
    return []


def _tensor(context: Context) -> list[str]:
    tensor, plan = context.sizes["tensor"], context.plan
    if tensor == 1 or plan is None:
        return []
    problems = []
    values = {name: context.model.get(name) for name in plan.divided}
    for name, value in values.items():
        if isinstance(value, int) and value % tensor:
            fits = [n for n in range(1, context.world_size + 1) if value % n == 0 and n <= value]
            nearest = min(fits, key=lambda n: abs(n - tensor))
            problems.append(
                f"strategy.tensor={tensor} does not divide model.{name}={value}. Type strategy.tensor={nearest}, "
                f"or model.{name}={-(-value // tensor) * tensor}."
            )
    sequence = context.model.get(plan.sequence) if plan.sequence else None
    if context.strategy.get("sequence_parallel", True) and isinstance(sequence, int) and sequence % tensor:
        problems.append(
            f"strategy.tensor={tensor} does not divide model.{plan.sequence}={sequence}, so its positions cannot be "
            "divided. Type strategy.sequence_parallel=false, or another length."
        )
    if not plan.tensor:
        problems.append(f"strategy.tensor={tensor}: the model's plan names no tensor styles. Type strategy=fsdp.")
    return problems


def _pipeline(context: Context) -> list[str]:
    pipe, plan, strategy = context.sizes["pipe"], context.plan, context.strategy
    if pipe == 1 or plan is None:
        return []
    schedule = strategy["schedule"]
    if schedule not in SCHEDULES:
        return [f"strategy.schedule={schedule}: there is no such schedule. Type one of {', '.join(SCHEDULES)}."]
    problems = []
    stages = pipe * SCHEDULES[schedule][0]
    layers = context.model.get(plan.layers)
    if isinstance(layers, int) and layers < stages:
        problems.append(
            f"strategy.pipe={pipe} with strategy.schedule={schedule} makes {stages} stages, but model.{plan.layers}="
            f"{layers}. Type strategy.pipe={max(1, layers // SCHEDULES[schedule][0])}, or a deeper model."
        )
    by_hand = strategy.get("stages")
    if by_hand is not None and (len(by_hand) != stages or sum(by_hand) != layers or min(by_hand) < 1):
        problems.append(
            f"strategy.stages={list(by_hand)} must be {stages} numbers from 1 that add up to "
            f"model.{plan.layers}={layers}."
        )
    if plan.tied and context.model.get(plan.tied):
        problems.append(
            f"strategy.pipe={pipe}: the first and the last stage cannot share a parameter. "
            f"Type model.{plan.tied}=false."
        )
    if plan.needs_inputs and (value := context.model.get(plan.needs_inputs)) is not None:
        problems.append(
            f"strategy.pipe={pipe}: model.{plan.needs_inputs}={value} needs the inputs in every block, and only the "
            f"first stage has them. Type model.{plan.needs_inputs}=null, or strategy=fsdp."
        )
    chunks, micro = strategy["microbatches"], context.cfg["data"].get("micro_batch_size")
    least = stages if schedule in ("1f1b", "zero_bubble") else pipe if schedule == "interleaved_1f1b" else 1
    if chunks < least:
        problems.append(
            f"strategy.microbatches={chunks} is too few for strategy.schedule={schedule} with {pipe} ranks. "
            f"Type strategy.microbatches={least}."
        )
    elif schedule == "interleaved_1f1b" and chunks % pipe:
        problems.append(
            f"strategy.microbatches={chunks} must be a multiple of strategy.pipe={pipe} for interleaved_1f1b. "
            f"Type strategy.microbatches={-(-chunks // pipe) * pipe}."
        )
    if isinstance(micro, int) and micro % max(1, chunks):
        fits = [n for n in range(least, micro + 1) if micro % n == 0]
        nearest = f"strategy.microbatches={min(fits, key=lambda n: abs(n - chunks))}, or " if fits else ""
        problems.append(
            f"data.micro_batch_size={micro} is not divided by strategy.microbatches={chunks}. "
            f"Type {nearest}data.micro_batch_size={math.lcm(micro, chunks) if micro > chunks else chunks}."
        )
    if schedule == "zero_bubble" and strategy.get("compile", "none") != "none":
        problems.append(
            "strategy.schedule=zero_bubble splits backward, which compiled blocks cannot. Type strategy.compile=none."
        )
    return problems


def _shard(context: Context) -> list[str]:
    if context.strategy.get("cpu_offload") and context.cfg["trainer"]["accelerator"] == "cpu":
        return ["strategy.cpu_offload=true moves weights from a GPU to the CPU; this run has no GPU. Type false."]
    return []


RULES: tuple[Callable[[Context], list[str]], ...] = (
    _precision, _refused, _compile, _float8, _plan, _tensor, _pipeline, _shard,
)  # fmt: skip
