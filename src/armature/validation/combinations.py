"""What cannot be combined, found before a process starts. Torch-free.

`UNSUPPORTED` lists values that do not work under a kind of strategy; a test checks each cell.
`RULES` lists by key what else its value excludes, `CALLBACKS` the same for Lightning's callbacks.
A rule is asked only where its key asks for something: `null`, `false`, `none`, `auto` and an axis
of one rank exclude nothing. `NUMBERS` are functions, about sizes that must divide each other. All
of them read one `Run`.

A callback, optimizer or any other class that a config names says the same of itself, in a class
attribute that is a literal:

    unsupported_strategies = {"zero3": "its weights are in pieces that have no names. Type
    strategy=fsdp"}
"""

import importlib.metadata
import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from armature import hardware
from armature.checkpoint import resume
from armature.data import batching
from armature.errors import ConfigError
from armature.finetune.check import DECODER, adapter_of
from armature.layout import Layout
from armature.models.decoder.check import ffn_hidden_of
from armature.models.plan import Plan
from armature.parallel import mesh
from armature.parallel.split import INTERLEAVED, Schedule
from armature.validation import signatures

CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
FLOAT8_CAPABILITY = (8, 9)
QUANTIZED_BLOCK = 64  # elements of a row that share a scale (`finetune.nf4`)
WHOLE = ("single", "ddp")  # kinds in which every rank holds the whole model
DIRECT_PREFERENCE = "armature.tasks.direct_preference.DirectPreference"


class Run:
    """What rules ask of a run: the keys of the groups trainer, launch and strategy by their own
    names, with the sizes of the mesh's axes. None stands for a key that is not there.

    Args:
        cfg: the whole configuration, resolved, as plain types.
        found: what a rank knows better than the configuration, such as `is_manual`.
    """

    def __init__(self, cfg: Mapping[str, Any], layout: Layout, **found: Any) -> None:
        ours = {**({} if layout.kind == "other" else layout.options), **layout.axes}
        self.layout, self.plan = layout, layout.plan or Plan()
        self.task, self.model, self.data = (cfg.get(key) or {} for key in ("task", "model", "data"))
        self.adapter = adapter_of(cfg) or {}
        self.cfg = {**cfg, "strategy": ours, "task": {**self.task, "adapter": self.adapter}}
        for each in (cfg.get("trainer"), cfg.get("launch"), ours, found):
            vars(self).update(each or {})

    def __getattr__(self, name: str) -> Any:
        return None

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key; of a group, the name of its class."""
        node: Any = self.cfg
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        is_class = isinstance(node, Mapping) and "_target_" in node
        return str(node["_target_"]).rpartition(".")[2] if is_class else node

    def attribute(self, group: str, name: str) -> Any:
        """Return a class attribute of what a group names."""
        return signatures.class_attribute(str(self[f"{group}._target_"]), name)

    @cached_property
    def methods(self) -> str:
        return ", ".join(self.layout.methods)

    @cached_property
    def uses_model(self) -> bool:
        """Whether the task takes the group model; else it makes its own."""
        return "_target_" not in self.task or bool(signatures.accepted(self.task, ["model"]))

    @cached_property
    def trained(self) -> str:
        return (self.model if self.uses_model else self.task)["_target_"]

    @cached_property
    def modalities(self) -> list[Any]:
        groups = ("task", "model") if self.uses_model else ()
        return [self.attribute(group, "modality") for group in groups]

    @cached_property
    def pairs(self) -> list[bool]:
        """Whether the task reads, and the data give, pairs of answers: both say so in a class
        attribute, `reads` or `gives`.
        """
        told = (("task", "reads"), ("data", "gives"))
        return [self.attribute(group, name) == "pairs" for group, name in told]

    @cached_property
    def shards_sequence(self) -> bool:
        """Whether the tensor axis shards positions too."""
        option, expert = self.sequence_parallel, self.expert or 1
        return mesh.shards_sequence(option, device=self.accelerator, expert=expert)

    @cached_property
    def own_experts(self) -> str | None:
        """The axis for which experts are on ranks of their own, as it is typed."""
        axes = [axis for axis in ("expert", "tensor") if (self[f"strategy.{axis}"] or 1) > 1]
        return (
            f"strategy.{axes[0]}={getattr(self, axes[0])}" if axes and self.plan.experts else None
        )

    @cached_property
    def is_manual(self) -> bool:
        return signatures.optimizes_manually(str(self.task.get("_target_")))

    @cached_property
    def accumulates(self) -> bool:
        """Whether a global batch takes several micro-batches."""
        micro, size = self.data["micro_batch_size"], batching.configured_batch_size(self.data)
        return bool(size) and isinstance(micro, int) and micro * self.layout.data_ranks < size

    @property
    def zero_bubble(self) -> bool:
        return self.pipe > 1 and self.schedule == "zero_bubble"

    @property
    def capability(self) -> tuple[int, int]:
        return hardware.compute_capability() or FLOAT8_CAPABILITY

    @property
    def torch(self) -> tuple[int, ...]:
        return tuple(map(int, importlib.metadata.version("torch").split(".")[:2]))

    @property
    def reads_checkpoint(self) -> bool:
        """Whether the run takes its weights from another run's checkpoint."""
        named = self.cfg.get("resume") or "auto"
        typed = named not in resume.MODES and self.model.get("pretrained") is None
        return typed and resume.run_of(resume.to_path(str(named))) is None


# KEY=VALUE → kind of strategy → why not, and what to type instead. All other pairs work and are
# tested.
UNSUPPORTED: dict[str, dict[str, str]] = {
    "trainer.precision=64-true": dict.fromkeys(
        ("shard", "tensor", "pipeline", "deepspeed"),
        "Lightning trains sharded models in at most fp32. Type trainer.precision=32-true, or "
        "strategy=ddp",
    ),
    "strategy.compile=model": dict.fromkeys(
        ("shard", "tensor", "pipeline", "deepspeed"),
        "it works block by block. Type strategy.compile=block",
    ),
    "trainer.gradient_clip_algorithm=value": {
        "deepspeed": "its engine clips by norm only. Type trainer.gradient_clip_algorithm=norm",
    },
    "trainer.on_nan=skip": {
        "deepspeed": "its engine makes the step. Type trainer.on_nan=stop, or strategy=fsdp",
    },
    "task.adapter.quantize=nf4": {
        "pipeline": "a pipeline with weights of 4 bits has not been tried. Type strategy=fsdp, or "
        "strategy=tensor",
        "deepspeed": "DeepSpeed makes one type of all weights. Type strategy=ddp, or strategy=fsdp",
    },
}

# when a value cannot work, and what is said of it, in which `r` is the run
Rules = list[tuple[Callable[[Run], Any], str]]
_NO_PLAN: Rules = [
    (
        lambda r: r.layout.plan is None,
        ": {r.trained} has no plan, which says how it may be sharded. Write PLAN in a plan.py next "
        "to the module of a model that your task takes as its argument model, or type "
        "strategy=fsdp or strategy=ddp, which need none.",
    )
]
_FOLDS = "or -m 'data.fold=range(5)' data.folds=5 for a run of each."

RULES: dict[str, Rules] = {
    "task": [
        (
            lambda r: (
                r.layout.kind == "deepspeed"
                and signatures.defines(str(r["task._target_"]), "configure_gradient_clipping")
            ),
            " has configure_gradient_clipping, which would find no gradients: DeepSpeed's engine "
            "clips. Type strategy=fsdp, or take trainer.gradient_clip_val=1.0 instead of the hook.",
        ),
        (
            lambda r: None not in r.modalities and len({*r.modalities}) > 1,
            " trains on {r.modalities[0]}, but model={r[model]} takes {r.modalities[1]}. "
            "Type task=language_modeling with a decoder and text, task=image_classification with a "
            "model and data of images, or task=text_classification with model=text_classifier and "
            "data=labeled_text.",
        ),
        (
            lambda r: r.pairs == [True, False],
            " learns from pairs of answers, and data={r[data]} gives none. Type "
            "data=preference. (A class of yours whose batches hold pairs says so: "
            'gives = "pairs".)',
        ),
        (
            lambda r: (
                r["task._target_"] == DIRECT_PREFERENCE
                and not r.adapter
                and not r["model.pretrained"]
            ),
            " with task.adapter=null trains all weights, and the reference is a copy of the model "
            "of a folder. Type model.pretrained=FOLDER, or leave task.adapter=null out.",
        ),
    ],
    "task.label_smoothing": [
        (
            lambda r: r["task.loss"] == "ipo" and r["task.label_smoothing"],
            " is of task.loss=sigmoid. Type task.label_smoothing=0.",
        ),
    ],
    "task.adapter.train": [
        (
            lambda r: r["task._target_"] == DIRECT_PREFERENCE,
            " changes the model without its adapters, too, which is the reference. Type "
            "task.adapter.train=null.",
        ),
    ],
    "task.adapter.quantize": [
        (
            lambda r: r["task._target_"] == DIRECT_PREFERENCE,
            ": preferences have not been compared on weights of 4 bits. Type "
            "task.adapter.quantize=null.",
        ),
        (
            lambda r: r["model._target_"] != DECODER,
            f" has been tried with {DECODER} alone, and model._target_={{r[model._target_]}}. Type "
            "task.adapter.quantize=null.",
        ),
        (
            lambda r: r.reads_checkpoint,
            " with resume={r[resume]}: weights are quantized while they are read from "
            "model.pretrained, not from a checkpoint. Write a folder (python scripts/convert.py "
            "RUN FOLDER) and type model.pretrained=FOLDER, or type task.adapter.quantize=null.",
        ),
        (
            lambda r: r.compile not in (None, "none"),
            " with strategy.compile={r.compile}: the compiler would keep each dense matrix from "
            "forward to backward. Type strategy.compile=none.",
        ),
        (
            # before, fully_shard takes no weights that are no floats
            lambda r: "shard" in r.layout.methods and r.torch < (2, 12),
            " with a sharded strategy needs torch 2.12; older ones shard floats "
            "only. Type pip install -U torch, or strategy=ddp, or strategy=tensor.",
        ),
    ],
    "data": [
        (
            lambda r: r.pairs == [False, True],
            " gives pairs of answers, which task={r[task]} does not compare. Type task=dpo, "
            "or data=chat for conversations. (A task of yours that reads pairs says so: "
            'reads = "pairs".)',
        ),
    ],
    "data.folds": [
        (
            lambda r: r["data.fold"] is None,
            f": which of them is held out? Type data.fold=0, {_FOLDS}",
        ),
    ],
    "data.fold": [
        (
            # a class that takes fold alone counts its folds itself
            lambda r: (
                not r["data.folds"]
                and signatures.signature_at(r["data._target_"]).parameters.keys()
                & batching.FOLD_KEYS
                != {"fold"}
            ),
            f": of how many? Type data.folds=5, {_FOLDS}",
        ),
        (
            lambda r: r["data.fold"] >= (r["data.folds"] or math.inf),
            " of data.folds={r[data.folds]}: folds are counted from 0. Type a number below "
            "data.folds, " + _FOLDS,
        ),
    ],
    "data.micro_batch_size": [
        (
            lambda r: r.is_manual and r.accumulates,
            ": {r[task]} optimizes manually (self.automatic_optimization = False), so it "
            "decides itself when to step, and a larger global batch cannot be accumulated. Type "
            "data.micro_batch_size=auto.",
        ),
    ],
    "trainer.precision": [
        (
            lambda r: r.precision == "16-mixed" and r.accelerator == "cpu",
            " needs a GPU. Type trainer.precision=bf16-mixed, or 32-true.",
        ),
    ],
    "trainer.gradient_clip_val": [
        (
            lambda r: r.is_manual,
            ": {r[task]} optimizes manually (self.automatic_optimization = False), where "
            "Lightning does not clip. Leave it out, and call "
            "self.clip_gradients(optimizer, gradient_clip_val=…) before optimizer.step().",
        ),
    ],
    "trainer.on_nan": [
        (
            lambda r: r.is_manual and r.on_nan == "skip",
            ": {r[task]} optimizes manually (self.automatic_optimization = False), so its "
            "updates cannot be left out. Type trainer.on_nan=stop.",
        ),
    ],
    "launch.min_ranks": [
        (
            lambda r: not 1 <= r.min_ranks <= r.devices,
            ": must be from 1 to trainer.devices={r.devices}, or null for a fixed number of ranks.",
        ),
        (
            lambda r: r.num_nodes > 1 or r.rdzv_endpoint,
            ": the number of ranks on several machines is fixed. Type launch.min_ranks=null.",
        ),
        (
            lambda r: r.max_restarts == 0,
            ", but launch.max_restarts=0: no rank is restarted. Type launch.max_restarts=auto, or "
            "launch.min_ranks=null.",
        ),
    ],
    "strategy.compile_mode": [
        (
            lambda r: r.compile == "none",
            ": nothing is compiled. Type strategy.compile=model with it, or for "
            "max-autotune-no-cudagraphs strategy.compile=block.",
        ),
        (
            lambda r: r.compile_mode in CUDA_GRAPH_MODES and not {*r.layout.methods} <= {*WHOLE},
            " does not work with this strategy ({r.methods}): a CUDA graph reads weights "
            "at the addresses where it was recorded, and here the addresses change in each step. "
            "Type strategy.compile_mode=max-autotune-no-cudagraphs, or strategy=ddp.",
        ),
        (
            lambda r: r.compile_mode in CUDA_GRAPH_MODES and r.compile == "block",
            " records a CUDA graph per compiled part, and strategy.compile=block makes a part of "
            "each block: where no gradient is computed, a block's graph overwrites the output of "
            "the block before. Type strategy.compile=model, or "
            "strategy.compile_mode=max-autotune-no-cudagraphs.",
        ),
    ],
    "strategy.float8": [
        (
            lambda r: r.adapter,
            " converts the Linears that task.adapter adapts, and would leave its adapters out. "
            "Type strategy.float8=false.",
        ),
        (
            lambda r: r.plan.experts,
            " converts Linears, and a mixture's experts are none. Type strategy.float8=false.",
        ),
        (
            lambda r: importlib.util.find_spec("torchao") is None,
            " needs torchao, which is not installed here. Type pip install torchao.",
        ),
        (
            lambda r: r.layout.plan is None,
            ": {r.trained} has no plan, which names the blocks to convert. Write PLAN in a plan.py "
            "next to the module of a model that your task takes as its argument model, or type "
            "strategy.float8=false.",
        ),
        (
            lambda r: r.float8 is True and r.accelerator != "gpu",
            ": trainer.accelerator={r.accelerator} has no float8 products. Type "
            "strategy.float8=false, or strategy.float8=emulate to see what it would do to the loss "
            "(slowly).",
        ),
        (
            lambda r: (
                r.float8 is True and r.accelerator == "gpu" and r.capability < FLOAT8_CAPABILITY
            ),
            " needs a GPU of compute capability 8.9 (Ada, Hopper and later); this one has "
            "{r.capability[0]}.{r.capability[1]}. Type strategy.float8=false.",
        ),
        (
            lambda r: r.float8 is True and not r.precision.startswith("bf16"),
            " with trainer.precision={r.precision}: everything outside of float8 should be in "
            "bf16. Type trainer.precision=bf16-mixed, or strategy.float8=false.",
        ),
        (
            lambda r: r.float8 is True and r.precision == "bf16-mixed" and r.compile == "none",
            " with strategy.compile=none and trainer.precision=bf16-mixed: torchao's products fail "
            "under autocast unless they are compiled, and are slower than bf16's. Type "
            "strategy.compile=block.",
        ),
    ],
    "strategy.cpu_offload": [
        (
            lambda r: r.accelerator == "cpu",
            " moves weights from a GPU to the CPU; this run has no GPU. Type false.",
        ),
        (
            lambda r: r.own_experts,
            " with {r.own_experts} has not been tried for a mixture of experts. Type "
            "strategy.cpu_offload=false, or strategy=fsdp.",
        ),
    ],
    "strategy.offload_parameters": [
        (
            lambda r: r.stage != 3,
            " with strategy.stage={r.stage}: only ZeRO-3 offloads weights. Type strategy.stage=3.",
        ),
    ],
    "strategy.context": [
        *_NO_PLAN,
        (
            lambda r: r.layout.plan and not r.plan.context,
            ": the plan of {r.trained} names no attention in `context`, which needs the positions "
            "of all ranks. Type strategy=fsdp, or a decoder such as model=gpt_nano or "
            "model=pretrained.",
        ),
    ],
    "strategy.context_method": [
        (
            lambda r: (
                r.context > 1
                and r.context_method == "all_gather"
                and r.plan.context
                and "causal" not in r.plan.context.values()
            ),
            ": the plan of {r.trained} names no causal attention in `context`. Type "
            "strategy.context_method=all_to_all.",
        ),
    ],
    "strategy.activation_checkpointing": [
        (
            lambda r: isinstance(r.activation_checkpointing, float) and r.compile == "none",
            " is a share of the memory that compiled code keeps. Type strategy.compile=block, or "
            "strategy.activation_checkpointing=selective.",
        ),
    ],
    "strategy.tensor": [
        *_NO_PLAN,
        (
            lambda r: r.layout.plan and not r.plan.tensor and not r.plan.from_instance,
            ": the model's plan names no tensor styles. Type strategy=fsdp.",
        ),
        (
            lambda r: r.plan.experts and not r.shards_sequence,
            " with strategy.sequence_parallel={r.sequence_parallel}: each rank would send the same "
            "tokens to the experts. Type strategy.sequence_parallel=true.",
        ),
    ],
    "strategy.async_tensor": [
        (
            lambda r: (
                r.tensor > 1
                and (r.accelerator != "gpu" or r.compile != "block" or not r.shards_sequence)
            ),
            " works in compiled blocks on GPUs, with sharded positions. Type "
            "strategy.async_tensor=auto, or with it trainer.accelerator=gpu strategy.compile=block "
            "strategy.sequence_parallel=true.",
        ),
    ],
    "strategy.expert": [
        (
            lambda r: not r.plan.experts and (r.layout.plan or r.uses_model),
            ": {r[model]} has no experts. Type strategy.expert=1, or a mixture such as "
            "model=mixture_nano.",
        ),
        (
            lambda r: r.plan.experts and r.compile != "none" and r.accelerator != "cpu",
            " with strategy.compile={r.compile} has not been tried on GPUs. Type "
            "strategy.compile=none.",
        ),
    ],
    "strategy.pipe": [
        *_NO_PLAN,
        (
            lambda r: r.is_manual,
            ": {r[task]} optimizes manually, and a pipeline makes the steps itself. Type "
            "strategy=ddp or strategy=fsdp.",
        ),
        (
            lambda r: r.model.get(r.plan.tied),
            ": the first and the last stage of a pipeline cannot share a parameter. Type "
            "model.{r.plan.tied}=false.",
        ),
        (
            lambda r: r.model.get(r.plan.needs_inputs) is not None,
            ": model.{r.plan.needs_inputs} needs the inputs in every block, and only the first "
            "stage has them. Type model.{r.plan.needs_inputs}=null, or strategy=fsdp.",
        ),
        (
            lambda r: r["data.source.packing"],
            ": data.source.packing=true puts several documents into a row, and only the first "
            "stage would know where they begin. Type data.source.packing=false, or strategy=fsdp.",
        ),
    ],
    "strategy.stages": [
        (
            lambda r: r.pipe == 1,
            " says which blocks each stage of a pipeline holds, but strategy.pipe=1. Type "
            "strategy.stages=null, or strategy=pipeline.",
        ),
    ],
    "strategy.virtual_stages": [
        (
            lambda r: r.pipe > 1 and r.schedule != INTERLEAVED and r.virtual_stages != 2,
            " is of interleaved stages, and strategy.schedule={r.schedule}. Type "
            "strategy.schedule=interleaved_1f1b, or leave it out.",
        ),
    ],
    "strategy.schedule": [
        (
            lambda r: (
                r.zero_bubble
                and r.reshard_after_forward
                and ("shard" in r.layout.methods or (r.plan.experts and r.tensor > 1))
            ),
            " with strategy.reshard_after_forward=true: its backward in two parts needs gathered "
            "weights until the end. Type strategy.reshard_after_forward=false, or "
            "strategy.schedule=1f1b.",
        ),
        (
            lambda r: r.zero_bubble and r.accelerator == "cpu" and r.torch < (2, 12),
            " on CPUs needs torch 2.12: 2.11 begins with messages from a rank to itself, which "
            "gloo refuses. Type pip install -U torch, or strategy.schedule=1f1b.",
        ),
        (
            lambda r: r.zero_bubble and r.compile != "none",
            " splits backward, which compiled blocks cannot. Type strategy.compile=none.",
        ),
        (
            lambda r: r.zero_bubble and r.activation_checkpointing in ("selective", "half"),
            " computes a block again for each part of its backward, which "
            "strategy.activation_checkpointing={r.activation_checkpointing} does once only. Type "
            "strategy.activation_checkpointing=every, or strategy.schedule=1f1b.",
        ),
    ],
}

# class of `lightning.pytorch.callbacks` → the same of it and those derived from it, which would
# train something else in silence, or save what cannot be resumed
_AVERAGING = "Type callbacks=ema, which averages under every strategy."
CALLBACKS: dict[str, Rules] = {
    **{
        name: [(lambda r: True, f" does not work here: {why}.")]
        for name, why in {
            "LearningRateFinder": "it trains before the run does. Type -m sweep=lr: one trial per "
            "learning rate",
            "BatchSizeFinder": "it trains before the run does. Type data.micro_batch_size=auto: "
            "the largest that fits. It does not change the result",
            "GradientAccumulationScheduler": "accumulation is data.global_batch_size / "
            "(data.micro_batch_size × data ranks) in every step. Type both",
            "ModelPruning": "it replaces parameters by masked ones, and a resume inside an epoch "
            "would train others. Prune the finished model, from armature.load",
            "SpikeDetection": "Lightning cannot load its state, so a stopped run could not be "
            "resumed. Type trainer.on_nan=skip against losses that are not finite",
            "StochasticWeightAveraging": "it averages by epochs, and its schedule is not resumed "
            "exactly. Type callbacks=ema, which averages under every strategy",
        }.items()
    },
    "WeightAveraging": [
        (
            lambda r: not {*r.layout.methods} <= {*WHOLE},
            " copies the whole model, but with this strategy ({r.methods}) ranks hold "
            "parts of it. " + _AVERAGING,
        ),
        (
            lambda r: (
                {*r.layout.methods} <= {*WHOLE}
                and signatures.defines(r.task["_target_"], "configure_model")
                and signatures.defines(r.model["_target_"], "initialize_parameter")
            ),
            " copies the model before it has weights: {r[task]} builds it later. " + _AVERAGING,
        ),
    ],
    "BaseFinetuning": [
        (
            # these reduce gradients of weights that are unfrozen
            lambda r: not {*r.layout.methods} <= {*WHOLE, "shard", "context"},
            " unfreezes weights during training, but with this strategy ({r.methods}) "
            "only weights that are trained from the first step on are kept equal on all ranks. "
            "Type strategy=ddp or strategy=fsdp, or give these weights a group with learning rate "
            "0 until they train.",
        ),
    ],
}


# ---------------------------------------------------------------- sizes that must divide each other
def _of_tensor(r: Run) -> Iterator[str]:
    for name in r.plan.divided:
        value = r.model.get(name)
        if isinstance(value, int) and value % r.tensor:
            yield (
                f"strategy.tensor={r.tensor} does not divide model.{name}={value}. Type "
                f"strategy.tensor={math.gcd(value, r.tensor)}, or strategy=fsdp, or of a new model "
                f"model.{name}={_next(value, r.tensor)}."
            )
    padded = ["multiple"] if r.attribute("data", "gives") == "pairs" else []
    for key, length in _lengths(r, "context", *padded) if r.shards_sequence else ():
        if length % r.tensor:
            yield (
                f"strategy.tensor={r.tensor} does not divide {key}={length}, so its positions "
                "cannot be sharded. Type strategy.sequence_parallel=false, or "
                f"{key}={_next(length, r.tensor)}."
            )


def _of_context(r: Run) -> Iterator[str]:
    if r.context == 1:
        return
    ranks, styles = f"strategy.context={r.context}", r.plan.context.values()
    gathers = "causal" in styles and r.context_method != "all_to_all"
    heads = r.model.get(r.plan.heads) if r.plan.context and not gathers else None
    if isinstance(heads, int) and heads % r.tensor == 0 and heads // r.tensor % r.context:
        both = f"{ranks} × strategy.tensor={r.tensor}" if r.tensor > 1 else ranks
        fits = math.gcd(heads // r.tensor, r.context)
        gather = " or strategy.context_method=all_gather" * ("causal" in styles)
        yield (
            f"{both} does not divide model.{r.plan.heads}={heads}: within attention each rank has "
            f"some of the heads. Type strategy.context={fits}{gather}."
        )
    # each rank has two pieces, and its tensor ranks equal parts of both together
    parts = r.context * math.lcm(2, r.tensor if r.shards_sequence else 1)
    shared = f" with strategy.tensor={r.tensor}" if r.shards_sequence and r.tensor > 1 else ""
    for key, length in _lengths(r, "context", "multiple"):
        if length % parts:
            yield (
                f"2 × {ranks}{shared} does not divide the positions of {key}={length}. Type "
                f"{key}={_next(length, parts)}."
            )


def _next(size: int, parts: int) -> int:
    return -(-size // parts) * parts


def _lengths(r: Run, *of_data: str) -> Iterator[tuple[str, int]]:
    """Yield what decides how many positions a sample has, by its key: the data, else the model."""
    lengths = {f"data.{key}": r.data.get(key) for key in of_data}
    # samples may be shorter than the model allows
    if r.plan.sequence and not isinstance(lengths["data.context"], int):
        lengths[f"model.{r.plan.sequence}"] = r.model.get(r.plan.sequence)
    yield from ((key, length) for key, length in lengths.items() if isinstance(length, int))


def _of_stages(r: Run) -> Iterator[str]:
    """Yield what is wrong with the numbers of a pipeline's stages and micro-batches."""
    if r.pipe == 1:
        return
    stages, layers = r.pipe * Schedule.of(vars(r)).stages_per_rank, r.model.get(r.plan.layers)
    chunks, micro = r.microbatches, r.data.get("micro_batch_size")
    if isinstance(layers, int) and layers < stages:
        fits = "schedule=1f1b" if layers >= r.pipe else f"pipe={layers} strategy.schedule=1f1b"
        yield (
            f"strategy.pipe={r.pipe} with strategy.schedule={r.schedule} makes {stages} stages, "
            f"but model.{r.plan.layers}={layers}. Type strategy.{fits}, or "
            f"model.{r.plan.layers}={stages}."
        )
    typed = r.stages
    if typed is not None and (len(typed) != stages or sum(typed) != layers or min(typed) < 1):
        yield (
            f"strategy.stages={typed} must be {stages} numbers from 1 that add up to "
            f"model.{r.plan.layers}={layers}."
        )
    least = {"gpipe": 1, INTERLEAVED: r.pipe}.get(r.schedule, stages)
    if chunks < least:
        yield (
            f"strategy.microbatches={chunks} is too few for strategy.schedule={r.schedule} with "
            f"{r.pipe} ranks. Type strategy.microbatches={least}."
        )
    elif r.schedule == INTERLEAVED and chunks % r.pipe:
        yield (
            f"strategy.microbatches={chunks} must be a multiple of strategy.pipe={r.pipe} for "
            f"interleaved_1f1b. Type strategy.microbatches={_next(chunks, r.pipe)}."
        )
    whole, ranks = batching.configured_batch_size(r.data), max(1, r.layout.data_ranks)
    share = (whole or chunks) // ranks
    if isinstance(micro, int) and micro % max(1, chunks):
        step = r.pipe if r.schedule == INTERLEAVED else 1
        fits = [n for n in range(least, min(micro, 4096) + 1, step) if micro % n == 0]
        ways = [f"strategy.microbatches={min(fits, key=lambda n: abs(n - chunks))}"] if fits else []
        size = math.gcd(share if whole else 0, _next(micro, chunks))
        if size % chunks == 0:
            ways.append(f"data.micro_batch_size={size}")
        else:
            larger = _next(share, chunks) * ranks
            ways.append(f"data.micro_batch_size={chunks} and data.global_batch_size={larger}")
        yield (
            f"data.micro_batch_size={micro} is not a multiple of strategy.microbatches={chunks}. "
            f"Type {', or '.join(ways)}."
        )
    elif not isinstance(micro, int) and share < chunks:
        yield (
            f"strategy.microbatches={chunks} is more than the {share} samples that each data rank "
            f"has of a global batch. Type strategy.microbatches={max(1, share)}, or a larger "
            "data.global_batch_size."
        )


def _of_experts(r: Run) -> Iterator[str]:
    key, expert = r.plan.expert_count, r.expert or 1
    count = r.model.get(key)
    if not r.plan.experts or r.layout.kind != "mesh":
        return
    if (problem := mesh.expert_problem(expert, r.layout.axes)) is not None:
        yield problem
    if isinstance(count, int) and count % expert:
        yield (
            f"strategy.expert={expert} does not divide model.{key}={count}. Type "
            f"strategy.expert={math.gcd(count, expert)}, or model.{key}={_next(count, expert)}."
        )
    if not r.own_experts:
        return
    # the type in which gradients are reduced, of which torch divides most itself
    param_dtype = None if r.precision in mesh.GATHERED_IN else r.param_dtype
    own = {"16-true": "float16", "64-true": "float64"}.get(r.precision)
    chosen = {
        f"strategy.reduce_dtype={r.reduce_dtype}": r.reduce_dtype,
        f"strategy.param_dtype={param_dtype}": param_dtype,
        f"trainer.precision={r.precision}": own or "float32",
    }
    typed, reduced = next((typed, dtype) for typed, dtype in chosen.items() if dtype)
    if reduced not in ("float32", "bfloat16"):
        yield (
            f"{typed} with {r.own_experts} would reduce gradients in {reduced} and divide those of "
            "experts twice. Type strategy.reduce_dtype=float32, or strategy.reduce_dtype=bfloat16."
        )
    ranks = r.shard * r.context * r.tensor
    # experts that are not whole on their ranks are cut by FSDP2, in equal parts only
    if ranks % expert == 0 and isinstance(count, int) and count % expert == 0 and count % ranks:
        for name in ("expert_hidden", "width"):
            size = r.model.get(name)
            if isinstance(size, int) and size % (ranks // expert):
                yield (
                    f"strategy.expert={expert} on {ranks} ranks cuts each expert over "
                    f"{ranks // expert} of them, which do not divide model.{name}={size}. Type "
                    f"model.{key}={_next(count, ranks)}, or another trainer.devices."
                )


def _of_quantized(r: Run) -> Iterator[str]:
    """Yield the sizes whose rows do not consist of whole blocks on every tensor rank."""
    if not r.adapter.get("quantize") or r["model._target_"] != DECODER:
        return
    model, typed = r.model, f"task.adapter.quantize={r.adapter['quantize']}"
    sizes = {
        "model.width": model["width"],
        "model.heads × head_dim": model["heads"]
        * (model.get("head_dim") or model["width"] // model["heads"]),
        "model.ffn_hidden": model.get("ffn_hidden") or ffn_hidden_of(model["width"]),
    }
    parts = {name: 1 if name == "model.width" else r.tensor for name in sizes}
    if odd := [f"{n}={size}" for n, size in sizes.items() if size % (QUANTIZED_BLOCK * parts[n])]:
        yield (
            f"{typed} with strategy.tensor={r.tensor}: each rank's rows are blocks of "
            f"{QUANTIZED_BLOCK} elements, which do not divide {', '.join(odd)}. Type "
            "task.adapter.quantize=null, or, in place of a tensor axis, strategy=fsdp."
        )


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


def _of_deepspeed(r: Run) -> Iterator[str]:
    for entry, instead in DEEPSPEED_ENTRIES.items():
        above, _, last = f"strategy.config.{entry}".rpartition(".")
        if last in (r[above] or {}):
            yield f"{above}.{last}: an option of armature's decides it. Type {instead}"


NUMBERS = (_of_tensor, _of_context, _of_stages, _of_experts, _of_quantized)


# ---------------------------------------------------------------- asking
_ASKS_FOR_NOTHING = ("None", "False", "none", "default", "auto", "[]", "{}")
_AXES = [f"strategy.{axis}" for axis in (*mesh.AXES, "expert")]


def problems(cfg: Mapping[str, Any], layout: Layout, **found: Any) -> list[str]:
    """Return all that would fail, from the whole configuration, resolved, as plain types.

    Args:
        found: what a rank knows better than the configuration, such as `is_manual`.
    """
    if layout.kind == "single" and layout.world_size > 1:
        return [
            f"strategy=single is one process, but there are {layout.world_size}. Type "
            "strategy=ddp, or trainer.devices=1."
        ]
    run = Run(cfg, layout, **found)
    return [
        *_unsupported(run),
        *(said for key, rules in RULES.items() for said in _broken(run, key, rules)),
        *_of_callbacks(run),
        *_of_deepspeed(run),
        *(said for each in NUMBERS if layout.plan for said in each(run)),
    ]


def callback_problems(kinds: Iterable[type], cfg: Mapping[str, Any], layout: Layout) -> list[str]:
    """Return what is wrong with callbacks that the configuration does not name."""
    run, whose = Run(cfg, layout), f"from configure_callbacks of {cfg['task']['_target_']}"
    return [
        said
        for kind in kinds
        for said in _of_callback(
            run, f"callbacks: {kind.__name__}, {whose} or a function", kind.__mro__
        )
    ]


def _broken(r: Run, key: str, rules: Rules) -> Iterator[str]:
    value = r[key]
    if str(value) not in _ASKS_FOR_NOTHING and not (key in _AXES and value == 1):
        shown = str(value).lower() if isinstance(value, bool) else value
        yield from (f"{key}={shown}{said.format(r=r)}" for when, said in rules if when(r))


def _of_callbacks(r: Run) -> Iterator[str]:
    for key, target in signatures.targets_in(r.cfg, "callbacks"):
        yield from _of_callback(
            r, f"{key}._target_={target}", signatures.lineage(target, libraries=True)
        )


def _of_callback(r: Run, what: str, kinds: Iterable[type]) -> Iterator[str]:
    for kind in kinds:
        if kind.__module__.startswith("lightning.pytorch.callbacks"):
            rules = CALLBACKS.get(kind.__name__, ())
            yield from (
                f"{what}: {kind.__name__}{said.format(r=r)}" for when, said in rules if when(r)
            )


def _unsupported(r: Run) -> Iterator[str]:
    """Yield values and classes that do not work under this kind of strategy."""
    keys = {typed: typed.partition("=")[0] for typed in UNSUPPORTED}
    asked = {t: UNSUPPORTED[t] for t, key in keys.items() if t == f"{key}={r[key]}"}
    for key, target in _targets(r.cfg):
        of_class = signatures.class_attribute(target, "unsupported_strategies") or {}
        asked[f"{key}={target.rpartition('.')[2]}"] = of_class
    for typed, why in asked.items():
        for method in r.layout.methods:
            if method in why:
                yield f"{typed} does not work with this strategy ({method}): {why[method]}."


def _targets(cfg: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the key and the `_target_` of each group, callback and logger."""
    for key, node in cfg.items():
        if isinstance(node, Mapping) and "_target_" in node:
            yield key, str(node["_target_"])
    for group in ("callbacks", "logger"):
        yield from signatures.targets_in(cfg, group)


def check_graphs(mode: str, accumulate: int) -> None:
    """Raise ConfigError if CUDA graphs are asked for and a step has several micro-batches."""
    if mode in CUDA_GRAPH_MODES and accumulate > 1:
        raise ConfigError(
            f"strategy.compile_mode={mode} with {accumulate} micro-batches per step: gradients lie "
            "in the memory of a CUDA graph, which the next micro-batch overwrites. Type "
            "strategy.compile_mode=max-autotune-no-cudagraphs, or a data.micro_batch_size with "
            "which a step has one micro-batch."
        )
