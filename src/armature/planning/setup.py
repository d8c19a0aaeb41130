"""A run reduced to the numbers that decide its memory and its seconds."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from armature import config
from armature.data import batching
from armature.errors import error_line
from armature.finetune.check import LORA
from armature.layout import Layout
from armature.models.cost import Cost
from armature.models.plan import module_beside
from armature.parallel.mesh import AXES, GATHERED_IN, shards_sequence
from armature.parallel.split import SCHEDULES, Schedule, balance_blocks, stages_of_rank
from armature.validation import signatures

log = logging.getLogger(__name__)
ADAM_BYTES, MOMENTUM_BYTES = 8, 4  # of fp32 state per parameter: two averages; one
LANGUAGE_MODELING = "armature.tasks.language_modeling.LanguageModeling"
KNOWN_OPTIMIZERS = ("adam", "adamw", "fusedadam", "muon", "sgd")


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Low-rank adapters of all Linears inside the blocks, which alone are trained; the matrices may
    have 4 bits.
    """

    rank: int
    in_4_bits: bool = False
    dropout: bool = False


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How one model is trained.

    Attributes:
        kind: single, ddp, mesh or deepspeed, as `layout.Layout` has it; `stage` and `offload`
            belong to DeepSpeed, and `offload` (weights, gradients and optimizer state in the host's
            memory) to a mesh, too.
        micro: samples per rank in one forward pass; `accumulate` of them make a step.
        recompute: none, selective, every, or a number n: each n-th block.
        expert: ranks that share out a mixture's experts, which get equally many tokens.
        averaged: whether a fp32 average of the trained weights is kept (callbacks=ema).
        separate_buckets: whether ddp's gradients lie beside the buckets that it sends.
        matrix_state, other_state: bytes of optimizer state per parameter of hidden matrices, and of
            all others.
    """

    cost: Cost
    kind: str
    axes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AXES, 1))
    world_size: int = 1
    micro: int = 1
    accumulate: int = 1
    precision: str = "bf16-mixed"
    recompute: str | int = "none"
    matrix_state: int = ADAM_BYTES
    other_state: int = ADAM_BYTES
    reshard: bool = True
    sequence_parallel: bool = True
    schedule: Schedule = SCHEDULES["1f1b"]
    microbatches: int = 4
    min_unit: int = 8_000_000
    stage: int = 0
    offload: bool = False
    offload_optimizer: bool = False
    on_cpu: bool = False
    adapters: Adapters | None = None
    expert: int = 1
    averaged: bool = False
    separate_buckets: bool = False
    param_dtype: str | None = None
    reduce_dtype: str | None = None

    @property
    def adapted(self) -> int:
        """Parameters of one block's adapters."""
        return 0 if self.adapters is None else self.adapters.rank * sum(map(sum, self.cost.linears))

    @property
    def trained(self) -> int:
        """Parameters of the whole model that have gradients."""
        return self.cost.parameters if self.adapters is None else self.cost.blocks * self.adapted

    @property
    def matrix_bytes(self) -> float | None:
        """Bytes of one block's matrices if they have 4 bits (`finetune.nf4`), else None."""
        if self.adapters is None or not self.adapters.in_4_bits:
            return None
        return sum(rows * (columns * (1 / 2 + 1 / 64) + 4) for rows, columns in self.cost.linears)

    @property
    def compute_bytes(self) -> int:
        """Bytes of an element that matrix products take."""
        return int(self.precision[:2]) // 8 if self.precision.startswith(("32", "64")) else 2

    @property
    def gathered_bytes(self) -> int:
        """Bytes of an element of gathered weights, and of a unit's gradients before they are
        reduced.
        """
        if self.kind != "mesh":
            return self.compute_bytes
        return self.compute_bytes if self.param_dtype is None else _element_bytes(self.param_dtype)

    @property
    def reduced_bytes(self) -> int:
        """Bytes of an element of the gradients that a mesh reduces: fp32 with 16-bit products, else
        as computed.
        """
        if self.reduce_dtype is not None:
            return _element_bytes(self.reduce_dtype)
        return 4 if self.precision in GATHERED_IN else self.gathered_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element of the weights that the optimizer steps."""
        return self.compute_bytes if self.precision.endswith("-true") else 4

    @property
    def data_ranks(self) -> int:
        return (
            self.axes["replicate"] * self.axes["shard"] if self.kind == "mesh" else self.world_size
        )

    @property
    def weight_ranks(self) -> int:
        """Ranks of a mesh that shard weights, gradients and optimizer state."""
        return self.axes["shard"] * self.axes["context"]

    @property
    def key_copies(self) -> int:
        """How often a context axis of more ranks than key-value heads sends each of them."""
        context, heads = self.axes["context"], self.cost.key_heads // self.axes["tensor"]
        return context // math.gcd(context, heads) if heads else 1

    @property
    def global_batch_size(self) -> int:
        return self.micro * self.accumulate * self.data_ranks

    @property
    def blocks_by_stage(self) -> Sequence[int]:
        """Blocks of each pipeline stage, balanced as the pipeline balances them."""
        return _balanced(self.cost, self.axes["pipe"] * self.schedule.stages_per_rank)

    @property
    def blocks_by_rank(self) -> Sequence[int]:
        """Blocks of each rank of a pipeline, which may hold two stages."""
        ranks = self.axes["pipe"]
        if ranks == 1:
            return [self.cost.blocks]
        of_stages = self.blocks_by_stage
        held = [stages_of_rank(rank, ranks=ranks, schedule=self.schedule) for rank in range(ranks)]
        return [sum(of_stages[stage] for stage in stages) for stages in held]

    def with_(self, **changes: Any) -> Setup:
        return replace(self, **changes)


def _element_bytes(dtype: str) -> int:
    return {"float64": 8, "float32": 4}.get(dtype, 2)


@cache  # a ranking asks for the same few a thousand times
def _balanced(cost: Cost, stages: int) -> Sequence[int]:
    block = cost.block - cost.idle_matrices  # as `parallel.pipeline.blocks_of_stages`
    return balance_blocks([block] * cost.blocks, stages=stages, first=cost.first, last=cost.last)


def cost_of(cfg: DictConfig) -> Cost | None:
    """Return what the configured model costs, by the `cost.py` beside it; None if there is none, or
    no model.

    A sample is as long as the data say, which may be less than the model allows.
    """
    if not signatures.accepted(cfg.task, ["model"]):
        return None
    definition = signatures.find_definition(cfg.model._target_)
    args: Any = OmegaConf.to_container(cfg.model, resolve=True)
    lengths = [args.get("context"), cfg.data.get("context")]
    if all(isinstance(length, int) for length in lengths):
        args["context"] = min(lengths)
    try:
        module = module_beside(definition[0], "cost") if definition is not None else None
        formula = getattr(module, "cost", None)
        own = {key: value for key, value in args.items() if key not in signatures.HYDRA_KEYS}
        cost = formula(own) if formula is not None else None
    except Exception as error:
        # a user's file of this name may be about anything, and a prediction must not end a run
        log.warning(
            "%s: its cost.py is not used, since it fails: %s", cfg.model._target_, error_line(error)
        )
        return None
    return cost if isinstance(cost, Cost) else None


def setup_of(cfg: DictConfig, layout: Layout) -> Setup | None:
    """Return the numbers of a configuration with its `auto` values decided; None if the model has
    no formula.

    With adapters (`task.adapter`) there is one if all Linears inside the blocks have them and
    nothing else is trained, without DeepSpeed. There is none for pairs, which are several rows and
    pass the model twice, nor for the schedule zero_bubble, which keeps activations for gradients
    that it computes later.

    Raises ConfigError if the batch does not divide.
    """
    cost, size = cost_of(cfg), batching.configured_batch_size(cfg.data)
    if cost is None or size is None or layout.kind == "other":
        return None
    adapter = cfg.task.get("adapter")
    if adapter and (layout.kind == "deepspeed" or not _adapts_all(cfg, cost)):
        return None
    if signatures.class_attribute(cfg.task._target_, "reads") == "pairs":
        return None
    if layout.axes["pipe"] > 1 and layout.options.get("schedule") == "zero_bubble":
        return None
    batches = batching.plan_batches(size, cfg.data.micro_batch_size, layout.data_ranks)
    matrix_state, other_state = optimizer_bytes(cfg)
    options, pipe = layout.options, layout.axes["pipe"]
    reshard = options.get("reshard_after_forward")
    expert = options.get("expert", 1)
    sequence = shards_sequence(
        options.get("sequence_parallel", "auto"), device=cfg.trainer.accelerator, expert=expert
    )
    return Setup(
        cost=cost,
        kind=layout.kind,
        axes=dict(layout.axes),
        world_size=layout.world_size,
        micro=batches.micro_batch_size,
        accumulate=batches.accumulate,
        precision=cfg.trainer.precision,
        recompute=options.get("activation_checkpointing", "none"),
        matrix_state=matrix_state,
        other_state=other_state,
        reshard=pipe == 1 if reshard is None else reshard,
        sequence_parallel=sequence,
        schedule=Schedule.of(options) if "schedule" in options else SCHEDULES["1f1b"],
        microbatches=options.get("microbatches", 4),
        min_unit=options.get("min_num_params", 8_000_000),
        stage=options.get("stage", 0),
        offload=options.get("cpu_offload", False) or options.get("offload_parameters", False),
        offload_optimizer=options.get("offload_optimizer", False),
        on_cpu=cfg.trainer.accelerator == "cpu",
        adapters=_adapters(adapter) if adapter else None,
        expert=expert,
        averaged=bool(config.averages(cfg)),
        separate_buckets=layout.kind == "ddp" and not options.get("gradient_as_bucket_view", True),
        param_dtype=options.get("param_dtype"),
        reduce_dtype=options.get("reduce_dtype"),
    )


def _adapters(node: Mapping[str, Any]) -> Adapters:
    given = {**signatures.defaults_of(LORA), **node}
    return Adapters(
        rank=given["rank"], in_4_bits=given["quantize"] is not None, dropout=bool(given["dropout"])
    )


def _adapts_all(cfg: DictConfig, cost: Cost) -> bool:
    """Return whether adapters of all the blocks' Linears are all that is trained, by a loss that
    `cost` is of.
    """
    adapter, known = cfg.task.adapter, str(cfg.task._target_) == LANGUAGE_MODELING
    ours = known and str(adapter.get("_target_")) == LORA
    others = any(adapter.get(key) for key in ("targets", "train"))
    return ours and bool(cost.linears) and not others


def knows_optimizer(cfg: DictConfig) -> bool:
    """Return whether `optimizer_bytes` is of the run's optimizer: a class that it knows, and not
    one of the task's.
    """
    name = str(cfg.optimizer._target_).rpartition(".")[2].lower()
    return name in KNOWN_OPTIMIZERS and bool(signatures.accepted(cfg.task, ["optimizer"]))


def optimizer_bytes(cfg: DictConfig) -> tuple[int, int]:
    """Return bytes of fp32 state per parameter of hidden matrices, and of the rest.

    An unknown class counts as Adam.
    """
    name = str(cfg.optimizer._target_).rpartition(".")[2].lower()
    if name == "muon":
        return MOMENTUM_BYTES, ADAM_BYTES
    if name == "sgd":
        state = MOMENTUM_BYTES if cfg.optimizer.get("momentum") else 0
        return state, state
    return ADAM_BYTES, ADAM_BYTES
