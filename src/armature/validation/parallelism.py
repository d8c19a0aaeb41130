"""What a strategy cannot do, found before a process starts. Torch-free.

`REFUSED` lists the features that do not work under a strategy; a test checks each cell. A callback,
optimizer or any other class that a config names says the same of itself, in a class attribute that
is a literal:

    unsupported_strategies = {"zero3": "its weights are in pieces that have no names. Type
    strategy=fsdp"}
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from armature import hardware
from armature.data import batching
from armature.errors import ConfigError
from armature.finetune import check as pretrained
from armature.layout import Layout
from armature.models.plan import Plan
from armature.parallel.split import INTERLEAVED, Schedule
from armature.validation import experts, lightning_callbacks, quantization, signatures

KINDS = ("single", "ddp", "shard", "context", "tensor", "pipeline", "deepspeed", "zero3")
FEATURES = (
    "32-true",
    "bf16-mixed",
    "bf16-true",
    "16-mixed",
    "compile=block",
    "compile=model",
    "clip=norm",
    "clip=value",
    "activation_checkpointing=every",
    "activation_checkpointing=selective",
    "ema",
    "muon",
    "float8",
)
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
FLOAT8_CAPABILITY = (8, 9)

# (feature, kind of strategy) → why not, and what to type instead. All other pairs work and are
# tested.
REFUSED: dict[tuple[str, str], str] = {
    **dict.fromkeys(
        [("64-true", method) for method in ("shard", "tensor", "pipeline", "deepspeed")],
        "Lightning trains sharded models in at most fp32. Type trainer.precision=32-true, or "
        "strategy=ddp",
    ),
    (
        "compile=model",
        "shard",
    ): "sharding gathers weights block by block. Type strategy.compile=block",
    (
        "compile=model",
        "tensor",
    ): "its collectives run between the blocks. Type strategy.compile=block",
    ("compile=model", "pipeline"): "a stage holds only some blocks. Type strategy.compile=block",
    ("compile=model", "deepspeed"): "its hooks run between the blocks. Type strategy.compile=block",
    (
        "clip=value",
        "deepspeed",
    ): "its engine clips by norm only. Type trainer.gradient_clip_algorithm=norm",
    (
        "on_nan=skip",
        "deepspeed",
    ): "its engine makes the step. Type trainer.on_nan=stop, or strategy=fsdp",
}


def problems(cfg: Mapping[str, Any], layout: Layout) -> list[str]:
    """Return all that would fail, from the whole configuration, resolved, as plain types."""
    if layout.kind == "other":
        return []
    if layout.kind == "single" and layout.world_size > 1:
        instead = "strategy=ddp, or trainer.devices=1"
        return [
            f"strategy=single is one process, but there are {layout.world_size}. Type {instead}."
        ]
    if layout.kind == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        remedy = "Type make setup EXTRAS=deepspeed, or strategy=fsdp."
        return [f"strategy=deepspeed: the package deepspeed is not installed. {remedy}"]
    return [problem for rule in RULES for problem in rule(cfg, layout)]


def _features(cfg: Mapping[str, Any], layout: Layout) -> list[str]:
    trainer = cfg["trainer"]
    features = [str(trainer["precision"]), f"compile={layout.options['compile']}"]
    features += [f"on_nan={trainer['on_nan']}"]
    features += ["float8"] if layout.options["float8"] else []
    features += (
        [f"clip={trainer['gradient_clip_algorithm']}"] if trainer["gradient_clip_val"] else []
    )
    return [
        f"{_typed(feature)} does not work with this strategy ({method}): "
        f"{REFUSED[feature, method]}."
        for method in layout.methods
        for feature in features
        if (feature, method) in REFUSED
    ]


def _typed(feature: str) -> str:
    """Return a feature as its key and value are typed."""
    name, _, value = feature.partition("=")
    if not value:
        return "strategy.float8=true" if name == "float8" else f"trainer.precision={name}"
    keys = {
        "compile": "strategy.compile",
        "on_nan": "trainer.on_nan",
        "clip": "trainer.gradient_clip_algorithm",
    }
    return f"{keys.get(name, name)}={value}"


def _classes(cfg: Mapping[str, Any], layout: Layout) -> list[str]:
    found = []
    for key, target in _targets(cfg):
        unsupported = signatures.class_attribute(target, "unsupported_strategies") or {}
        what = f"{key}={target.rpartition('.')[2]} does not work with this strategy"
        found += [
            f"{what} ({method}): {unsupported[method]}."
            for method in layout.methods
            if method in unsupported
        ]
    return found + lightning_callbacks.problems(cfg, layout)


def _targets(cfg: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the key and the `_target_` of each group, callback and logger."""
    for key, node in cfg.items():
        if isinstance(node, Mapping) and "_target_" in node:
            yield key, str(node["_target_"])
    for group in ("callbacks", "logger"):
        yield from signatures.targets_in(cfg, group)


def _precision(cfg: Mapping[str, Any], layout: Layout) -> list[str]:
    if cfg["trainer"]["precision"] == "16-mixed" and cfg["trainer"]["accelerator"] == "cpu":
        return [
            "trainer.precision=16-mixed needs a GPU. Type trainer.precision=bf16-mixed, or 32-true."
        ]
    return []


def _compile(cfg: Mapping[str, Any], layout: Layout) -> list[str]:
    mode = layout.options["compile_mode"]
    if mode != "default" and layout.options["compile"] == "none":
        kind = "model" if mode in CUDA_GRAPH_MODES else "block"
        return [
            f"strategy.compile_mode={mode}: nothing is compiled. Type strategy.compile={kind} with "
            "it."
        ]
    others = set(layout.methods) - {"single", "ddp"}
    if mode in CUDA_GRAPH_MODES and others:
        return [
            f"strategy.compile_mode={mode} does not work with this strategy "
            f"({', '.join(sorted(others))}): a CUDA graph reads weights at the addresses where it "
            "was recorded, and here the addresses change in each step. Type "
            "strategy.compile_mode=max-autotune-no-cudagraphs, or strategy=ddp."
        ]
    if mode in CUDA_GRAPH_MODES and layout.options["compile"] == "block":
        return [
            f"strategy.compile_mode={mode} records a CUDA graph per compiled part, and "
            "strategy.compile=block makes a part of each block: where no gradient is computed, a "
            "block's graph overwrites the output of the block before. Type strategy.compile=model, "
            "or strategy.compile_mode=max-autotune-no-cudagraphs."
        ]
    return []


def check_graphs(mode: str, accumulate: int) -> None:
    """Raise ConfigError if CUDA graphs are asked for and a step has several micro-batches."""
    if mode in CUDA_GRAPH_MODES and accumulate > 1:
        raise ConfigError(
            f"strategy.compile_mode={mode} with {accumulate} micro-batches per step: gradients lie "
            "in the memory of a CUDA graph, which the next micro-batch overwrites. Type "
            "strategy.compile_mode=max-autotune-no-cudagraphs, or a data.micro_batch_size with "
            "which a step has one micro-batch."
        )


def _recomputation(cfg: Mapping[str, Any], layout: Layout) -> list[str]:
    mode = layout.options["activation_checkpointing"]
    if not isinstance(mode, float) or layout.options["compile"] != "none":
        return []
    return [
        f"strategy.activation_checkpointing={mode} is a share of the memory that compiled code "
        "keeps. Type strategy.compile=block, or strategy.activation_checkpointing=selective."
    ]


def _float8(cfg: Mapping[str, Any], layout: Layout) -> list[str]:
    asked, trainer = layout.options["float8"], cfg["trainer"]
    if asked is False:
        return []
    problems = []
    if pretrained.adapter_of(cfg) is not None:
        problems.append(
            f"strategy.float8={str(asked).lower()} converts the Linears that task.adapter adapts, "
            "and would leave its adapters out. Type strategy.float8=false."
        )
    if importlib.util.find_spec("torchao") is None:
        problems.append(
            "strategy.float8 needs torchao, which is not installed here. Type pip install torchao."
        )
    if layout.plan is None:
        problems.append(
            f"strategy.float8={str(asked).lower()}: {_trained(cfg)} has no plan, which "
            "names the blocks to convert. Write PLAN in a plan.py next to the model's module, or "
            "type strategy.float8=false."
        )
    if asked == "emulate":
        return problems
    if trainer["accelerator"] != "gpu":
        problems.append(
            f"strategy.float8=true: trainer.accelerator={trainer['accelerator']} has no float8 "
            "products. Type strategy.float8=false, or strategy.float8=emulate to see what it would "
            "do to the loss (slowly)."
        )
    elif (
        capability := hardware.compute_capability()
    ) is not None and capability < FLOAT8_CAPABILITY:
        problems.append(
            "strategy.float8=true needs a GPU of compute capability "
            f"{'.'.join(map(str, FLOAT8_CAPABILITY))} (Ada, Hopper and later); this one has "
            f"{'.'.join(map(str, capability))}. Type strategy.float8=false."
        )
    if not str(trainer["precision"]).startswith("bf16"):
        problems.append(
            f"strategy.float8=true with trainer.precision={trainer['precision']}: everything "
            "outside of float8 should "
            "be in bf16. Type trainer.precision=bf16-mixed, or strategy.float8=false."
        )
    elif trainer["precision"] == "bf16-mixed" and layout.options["compile"] == "none":
        problems.append(
            "strategy.float8=true with strategy.compile=none and trainer.precision=bf16-mixed: "
            "torchao's products fail under autocast unless they are compiled, and are slower than "
            "bf16's. Type strategy.compile=block."
        )
    return problems


def _trained(cfg: Mapping[str, Any]) -> str:
    """Return the class whose layers are trained: the model, or a task that makes its own."""
    task = cfg.get("task")
    makes_own = task is not None and not signatures.accepted(task, ["model"])
    return cfg["task" if makes_own else "model"]["_target_"]


def _plan(cfg: Mapping[str, Any], layout: Layout) -> list[str]:
    used = [axis for axis in ("context", "tensor", "pipe") if layout.axes[axis] > 1]
    if used and layout.plan is None:
        axes = " and ".join(f"strategy.{axis}={layout.axes[axis]}" for axis in used)
        return [
            f"{axes}: {_trained(cfg)} has no plan, which says how it may be sharded. "
            "Write PLAN in a plan.py next to the model's module, or type strategy=fsdp or "
            "strategy=ddp, which need none."
        ]
    return []


def _tensor(cfg: Mapping[str, Any], layout: Layout) -> list[str]:
    tensor, plan = layout.axes["tensor"], layout.plan
    if tensor == 1 or plan is None:
        return []
    problems = []
    for name in plan.divided:
        value = cfg["model"].get(name)
        if isinstance(value, int) and value % tensor:
            fits = [n for n in range(1, layout.world_size + 1) if value % n == 0 and n <= value]
            nearest = min(fits, key=lambda n: abs(n - tensor))
            problems.append(
                f"strategy.tensor={tensor} does not divide model.{name}={value}. Type "
                f"strategy.tensor={nearest}, or model.{name}={-(-value // tensor) * tensor}."
            )
    shards = experts.shards_sequence(cfg, layout)
    if layout.options["async_tensor"] is True and (
        cfg["trainer"]["accelerator"] != "gpu" or layout.options["compile"] != "block" or not shards
    ):
        problems.append(
            "strategy.async_tensor=true works in compiled blocks on GPUs, with sharded positions. "
            "Type strategy.async_tensor=auto, or with it trainer.accelerator=gpu "
            "strategy.compile=block strategy.sequence_parallel=true."
        )
    for key, length in _lengths(cfg, plan, "context").items():
        if shards and length % tensor:
            problems.append(
                f"strategy.tensor={tensor} does not divide {key}={length}, so its positions cannot "
                "be sharded. Type "
                f"strategy.sequence_parallel=false, or {key}={-(-length // tensor) * tensor}."
            )
    multiple = cfg["data"].get("multiple")  # of rows that are padded
    of_pairs = (
        multiple is not None
        and signatures.class_attribute(cfg["data"]["_target_"], "gives") == "pairs"
    )
    if shards and of_pairs and isinstance(multiple, int) and multiple % tensor:
        problems.append(
            f"strategy.tensor={tensor} does not divide data.multiple={multiple}, so the positions "
            f"of a batch cannot be sharded. Type data.multiple={-(-multiple // tensor) * tensor}."
        )
    if not plan.tensor and not plan.from_instance:
        problems.append(
            f"strategy.tensor={tensor}: the model's plan names no tensor styles. Type "
            "strategy=fsdp."
        )
    return problems


def _context(cfg: Mapping[str, Any], layout: Layout) -> list[str]:
    context, tensor, plan, model = (
        layout.axes["context"],
        layout.axes["tensor"],
        layout.plan,
        cfg["model"],
    )
    if context == 1 or plan is None:
        return []
    if not plan.context:
        return [
            f"strategy.context={context}: the plan of {model['_target_']} names no attention in "
            "`context`, which needs the positions of all ranks. Type strategy=fsdp, or a decoder "
            "such as model=gpt_nano or model=pretrained."
        ]
    problems, method = [], layout.options["context_method"]
    both, heads = "causal" in plan.context.values(), model.get(plan.heads)
    if method == "all_gather" and not both:
        problems.append(
            f"strategy.context_method=all_gather: the plan of {model['_target_']} names no causal "
            "attention in `context`. Type strategy.context_method=all_to_all."
        )
    elif (
        (method == "all_to_all" or not both)
        and isinstance(heads, int)
        and heads % tensor == 0
        and heads // tensor % context
    ):
        ranks = f"strategy.context={context}" + (
            f" × strategy.tensor={tensor}" if tensor > 1 else ""
        )
        fits = max(n for n in range(1, context) if heads // tensor % n == 0)
        gather = " or strategy.context_method=all_gather" * both
        problems.append(
            f"{ranks} does not divide model.{plan.heads}={heads}: within attention each rank has "
            f"some of the heads. Type strategy.context={fits}{gather}."
        )
    shards = tensor > 1 and experts.shards_sequence(cfg, layout)
    # each rank has two pieces, and its tensor ranks equal parts of both together
    parts = context * math.lcm(2, tensor if shards else 1)
    for key, length in _lengths(cfg, plan, "context", "multiple").items():
        if length % parts:
            ranks = f"2 × strategy.context={context}" + (
                f" with strategy.tensor={tensor}" if shards else ""
            )
            problems.append(
                f"{ranks} does not divide the positions of {key}={length}. Type "
                f"{key}={-(-length // parts) * parts}."
            )
    return problems


def _lengths(cfg: Mapping[str, Any], plan: Plan, *of_data: str) -> dict[str, int]:
    """Return what decides how many positions a sample has, by its key: the data, else the model."""
    lengths = {f"model.{plan.sequence}": cfg["model"].get(plan.sequence) if plan.sequence else None}
    lengths |= {f"data.{key}": cfg["data"].get(key) for key in of_data}
    lengths = {key: length for key, length in lengths.items() if isinstance(length, int)}
    if "data.context" in lengths:  # samples may be shorter than the model allows
        lengths = {key: length for key, length in lengths.items() if not key.startswith("model.")}
    return lengths


def _pipeline(cfg: Mapping[str, Any], layout: Layout) -> list[str]:
    pipe, plan, strategy = layout.axes["pipe"], layout.plan, layout.options
    if layout.kind == "mesh" and pipe == 1 and strategy["stages"] is not None:
        return [
            f"strategy.stages={list(strategy['stages'])} says which blocks each stage of a "
            "pipeline holds, but strategy.pipe=1. Type strategy.stages=null, or strategy=pipeline."
        ]
    if pipe == 1 or plan is None:
        return []
    schedule = strategy["schedule"]
    problems: list[str] = []
    per_rank = Schedule.of(strategy).stages_per_rank
    stages, layers = pipe * per_rank, cfg["model"].get(plan.layers)
    if schedule != INTERLEAVED and strategy["virtual_stages"] != 2:
        problems.append(
            f"strategy.virtual_stages={strategy['virtual_stages']} is of interleaved stages, and "
            f"strategy.schedule={schedule}. Type strategy.schedule={INTERLEAVED}, or leave it out."
        )
    if isinstance(layers, int) and layers < stages:
        problems.append(
            f"strategy.pipe={pipe} with strategy.schedule={schedule} makes {stages} stages, but "
            f"model.{plan.layers}={layers}. Type strategy.pipe={max(1, layers // per_rank)}, or a "
            "deeper model."
        )
    by_hand = strategy["stages"]
    if by_hand is not None and (
        len(by_hand) != stages or sum(by_hand) != layers or min(by_hand) < 1
    ):
        total = f"model.{plan.layers}={layers}"
        problems.append(
            f"strategy.stages={list(by_hand)} must be {stages} numbers from 1 that add up to "
            f"{total}."
        )
    if plan.tied and cfg["model"].get(plan.tied):
        instead = f"model.{plan.tied}=false"
        problems.append(
            f"strategy.pipe={pipe}: the first and the last stage cannot share a parameter. Type "
            f"{instead}."
        )
    if plan.needs_inputs and (value := cfg["model"].get(plan.needs_inputs)) is not None:
        problems.append(
            f"strategy.pipe={pipe}: model.{plan.needs_inputs}={value} needs the inputs in every "
            "block, and only the "
            f"first stage has them. Type model.{plan.needs_inputs}=null, or strategy=fsdp."
        )
    source = cfg["data"].get("source")
    if isinstance(source, Mapping) and source.get("packing"):
        problems.append(
            f"strategy.pipe={pipe}: data.source.packing=true puts several documents into a row, "
            "and only the first "
            "stage would know where they begin. Type data.source.packing=false, or strategy=fsdp."
        )
    chunks, micro = strategy["microbatches"], cfg["data"].get("micro_batch_size")
    least = (
        stages if schedule in ("1f1b", "zero_bubble") else pipe if schedule == INTERLEAVED else 1
    )
    if chunks < least:
        problems.append(
            f"strategy.microbatches={chunks} is too few for strategy.schedule={schedule} with "
            f"{pipe} ranks. Type strategy.microbatches={least}."
        )
    elif schedule == INTERLEAVED and chunks % pipe:
        problems.append(
            f"strategy.microbatches={chunks} must be a multiple of strategy.pipe={pipe} for "
            f"interleaved_1f1b. Type strategy.microbatches={-(-chunks // pipe) * pipe}."
        )
    if isinstance(micro, int) and micro % max(1, chunks):
        fits = [n for n in range(least, micro + 1) if micro % n == 0]
        nearest = (
            f"strategy.microbatches={min(fits, key=lambda n: abs(n - chunks))}, or " if fits else ""
        )
        larger = math.lcm(micro, chunks) if micro > chunks else chunks
        problems.append(
            f"data.micro_batch_size={micro} is not a multiple of strategy.microbatches={chunks}. "
            f"Type {nearest}data.micro_batch_size={larger}."
        )
    share = (batching.configured_batch_size(cfg["data"]) or chunks) // max(1, layout.data_ranks)
    if not isinstance(micro, int) and share < chunks:
        problems.append(
            f"strategy.microbatches={chunks} is more than the {share} samples that each data rank "
            f"has of a global batch. Type strategy.microbatches={max(1, share)}, or a larger "
            "data.global_batch_size."
        )
    sharded = layout.axes["replicate"] * layout.axes["shard"] * layout.axes["context"] > 1
    # ranks of the tensor axis, too
    sharded = sharded or (plan.experts is not None and layout.axes["tensor"] > 1)
    if schedule == "zero_bubble" and strategy["reshard_after_forward"] and sharded:
        problems.append(
            "strategy.schedule=zero_bubble with strategy.reshard_after_forward=true: its backward "
            "in two parts needs gathered weights until the end. Type "
            "strategy.reshard_after_forward=false, or strategy.schedule=1f1b."
        )
    if schedule == "zero_bubble" and strategy["compile"] != "none":
        why = "splits backward, which compiled blocks cannot"
        problems.append(f"strategy.schedule=zero_bubble {why}. Type strategy.compile=none.")
    mode = strategy["activation_checkpointing"]
    if schedule == "zero_bubble" and mode in ("selective", "half"):
        problems.append(
            "strategy.schedule=zero_bubble computes a block again for each part of its backward, "
            f"which strategy.activation_checkpointing={mode} does once only. Type "
            "strategy.activation_checkpointing=every, or strategy.schedule=1f1b."
        )
    return problems


def _shard(cfg: Mapping[str, Any], layout: Layout) -> list[str]:
    if (
        layout.kind == "mesh"
        and layout.options["cpu_offload"]
        and cfg["trainer"]["accelerator"] == "cpu"
    ):
        return [
            "strategy.cpu_offload=true moves weights from a GPU to the CPU; this run has no GPU. "
            "Type false."
        ]
    return []


# entries of strategy.config that options of ours decide → what to type instead
DEEPSPEED_ENTRIES = {
    "optimizer": "optimizer=…",
    "scheduler": "scheduler=…",
    "gradient_clipping": "trainer.gradient_clip_val=…",
    "train_batch_size": "data.global_batch_size=…",
    "train_micro_batch_size_per_gpu": "data.micro_batch_size=…",
    "gradient_accumulation_steps": "data.micro_batch_size=…",
    "gradient_allreduce_op": "optimizer.lr=…",
    "managed_gradient_accumulation": "data.micro_batch_size=…",
    "fp16.enabled": "trainer.precision=…",
    "bf16.enabled": "trainer.precision=…",
    "torch_autocast": "trainer.precision=…",
    "zero_optimization.stage": "strategy.stage=…",
    "zero_optimization.compute_grad_norm": "trainer.on_nan=ignore",
}


def _deepspeed_entries(cfg: Mapping[str, Any], layout: Layout) -> list[str]:
    found = []
    for key, instead in DEEPSPEED_ENTRIES.items():
        *above, last = key.split(".")
        node = (layout.options.get("config") or {}) if layout.kind == "deepspeed" else {}
        for word in above:
            node = node.get(word) or {}
        if last in node:
            found.append(
                f"strategy.config.{key}: an option of armature's decides it. Type {instead}"
            )
    return found


RULES: tuple[Callable[[Mapping[str, Any], Layout], list[str]], ...] = (
    _precision,
    _features,
    _classes,
    _compile,
    _recomputation,
    _float8,
    _plan,
    _tensor,
    _context,
    experts.problems,
    _pipeline,
    _shard,
    _deepspeed_entries,
    quantization.problems,
)
