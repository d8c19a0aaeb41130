"""A run reduced to the numbers that decide its memory and its seconds."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from armature.parallel.mesh import AXES, GATHERED_IN, gathers_keys, shards_sequence
from armature.parallel.split import balance_blocks
from armature.validation import signatures

log = logging.getLogger(__name__)
ADAM_BYTES, MOMENTUM_BYTES = 8, 4  # of fp32 state per parameter: two averages; one
LANGUAGE_MODELING = "armature.tasks.language_modeling.LanguageModeling"
KNOWN_OPTIMIZERS = ("adam", "adamw", "fusedadam", "muon", "sgd")
SCHEDULE = "1f1b"  # the pipeline schedule that the formulas are of


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How one model is trained.

    Attributes:
        kind: single, ddp, mesh or deepspeed, as `layout.Layout` has it; `stage` belongs to
            DeepSpeed, `offload` (weights, gradients and optimizer state in the host's memory) to
            a mesh, too.
        micro: samples per rank in one forward pass; `accumulate` of them make a step.
        recompute: none, selective, half, every, or a number n: each n-th block.
        adapter_rank: of adapters of all Linears inside the blocks, which alone are trained; 0:
            none. The matrices may have 4 bits.
        expert: ranks that share out a mixture's experts, which get equally many tokens.
        gathers_keys: whether ranks of the context axis gather keys and values (`parallel.mesh`).
        averaged: whether a fp32 average of the trained weights is kept (callbacks=ema).
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
    microbatches: int = 4
    min_unit: int = 8_000_000
    stage: int = 0
    offload: bool = False
    offload_optimizer: bool = False
    on_cpu: bool = False
    adapter_rank: int = 0
    in_4_bits: bool = False
    expert: int = 1
    gathers_keys: bool = False
    averaged: bool = False
    param_dtype: str | None = None
    reduce_dtype: str | None = None

    # ------------------------------------------------------------ bytes of an element
    @property
    def compute_bytes(self) -> int:
        """Of what matrix products take."""
        return int(self.precision[:2]) // 8 if self.precision.startswith(("32", "64")) else 2

    @property
    def gathered_bytes(self) -> int:
        """Of gathered weights, and of a unit's gradients before they are reduced."""
        mesh = self.kind == "mesh" and self.param_dtype is not None
        return _element_bytes(self.param_dtype) if mesh else self.compute_bytes

    @property
    def reduced_bytes(self) -> int:
        """Of the gradients that a mesh reduces: fp32 with 16-bit products, else as computed."""
        if self.reduce_dtype is not None:
            return _element_bytes(self.reduce_dtype)
        return 4 if self.precision in GATHERED_IN else self.gathered_bytes

    @property
    def weight_bytes(self) -> int:
        """Of the weights that the optimizer steps."""
        return self.compute_bytes if self.precision.endswith("-true") else 4

    @property
    def residual_bytes(self) -> int:
        """Of the residual stream: of the embedding's output."""
        gathers = self.sharded or self.kind == "deepspeed"
        return self.gathered_bytes if gathers else self.weight_bytes

    # ------------------------------------------------------------ parameters
    @property
    def adapted(self) -> int:
        """Parameters of one block's adapters."""
        return self.adapter_rank * sum(map(sum, self.cost.linears))

    @property
    def trained(self) -> int:
        """Parameters of the whole model that have gradients."""
        return self.cost.blocks * self.adapted if self.adapter_rank else self.cost.parameters

    @property
    def packed_bytes(self) -> float:
        """Bytes of one block's matrices if they have 4 bits (`finetune.nf4`), else 0."""
        each = (rows * (columns * (1 / 2 + 1 / 64) + 4) for rows, columns in self.cost.linears)
        return sum(each) if self.in_4_bits else 0

    def block_elements(self, *, gathered: bool = False) -> float:
        """Return a block's parameters on a rank before sharding.

        Gathered: of a mixture's experts, those of one rank.
        """
        cost, tensor = self.cost, self.axes["tensor"]
        apart = cost.experts * (1 / self.expert - 1 / tensor) if gathered else 0
        return cost.block / tensor + apart

    def block_bytes(self, each: int, *, gathered: bool = False) -> float:
        """Return bytes of these weights if an element has `each`."""
        size = each * self.block_elements(gathered=gathered)
        if self.in_4_bits:
            size -= (each * self.cost.block_matrices - self.packed_bytes) / self.axes["tensor"]
        return size

    # ------------------------------------------------------------ ranks
    @property
    def sharded(self) -> bool:
        """Whether weights are gathered before they are used."""
        mesh = self.kind == "mesh" and self.data_ranks * self.axes["context"] > 1
        return mesh or (self.kind == "deepspeed" and self.stage == 3)

    @property
    def data_ranks(self) -> int:
        mesh = self.axes["replicate"] * self.axes["shard"]
        return mesh if self.kind == "mesh" else self.world_size

    @property
    def weight_ranks(self) -> int:
        """Ranks that shard weights, gradients and optimizer state: of a mesh, or of ZeRO."""
        if self.kind == "deepspeed":
            return self.world_size
        return self.axes["shard"] * self.axes["context"] if self.kind == "mesh" else 1

    @property
    def offloads(self) -> bool:
        return self.offload or self.offload_optimizer

    @property
    def global_batch_size(self) -> int:
        return self.micro * self.accumulate * self.data_ranks

    @property
    def blocks_by_rank(self) -> Sequence[int]:
        """Blocks of each rank of a pipeline, balanced as the pipeline balances them."""
        return _balanced(self.cost, self.axes["pipe"])


def _element_bytes(dtype: str | None) -> int:
    return {"float64": 8, "float32": 4}.get(str(dtype), 2)


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
        module = module_beside(definition.__module__, "cost") if definition is not None else None
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
    """Return the numbers of a configuration with its `auto` values decided; None if there is no
    formula for its memory.

    There is one for models with a `cost.py`, for adapters of all Linears inside the blocks without
    DeepSpeed, and for pipelines of the schedule 1f1b; none for pairs of answers, which are several
    rows and pass the model twice, and for a share of the memory, which the compiler finds.

    Raises ConfigError if the batch does not divide.
    """
    cost, size = cost_of(cfg), batching.configured_batch_size(cfg.data)
    if cost is None or size is None or layout.kind == "other":
        return None
    options, adapter = layout.options, cfg.task.get("adapter")
    if isinstance(options.get("activation_checkpointing"), float):
        return None
    if adapter and (layout.kind == "deepspeed" or not _adapts_all(cfg, cost)):
        return None
    if signatures.class_attribute(cfg.task._target_, "reads") == "pairs":
        return None
    if layout.axes["pipe"] > 1 and options.get("schedule", SCHEDULE) != SCHEDULE:
        return None
    batches = batching.plan_batches(size, cfg.data.micro_batch_size, layout.data_ranks)
    matrix_state, other_state = _optimizer_bytes(cfg)
    reshard, expert = options.get("reshard_after_forward"), options.get("expert", 1)
    plan, axes = layout.plan, layout.axes
    heads = cfg.model.get(plan.heads) if plan is not None else None
    method = options.get("context_method", "auto")
    lora = {**signatures.defaults_of(LORA), **adapter} if adapter else {}
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
        reshard=layout.axes["pipe"] == 1 if reshard is None else reshard,
        sequence_parallel=shards_sequence(
            options.get("sequence_parallel", "auto"), device=cfg.trainer.accelerator, expert=expert
        ),
        microbatches=options.get("microbatches", 4),
        min_unit=options.get("min_num_params", 8_000_000),
        stage=options.get("stage", 0),
        offload=options.get("cpu_offload", False) or options.get("offload_parameters", False),
        offload_optimizer=options.get("offload_optimizer", False),
        on_cpu=cfg.trainer.accelerator == "cpu",
        adapter_rank=lora.get("rank", 0),
        in_4_bits=lora.get("quantize") is not None,
        expert=expert,
        gathers_keys=axes["context"] > 1
        and gathers_keys(method, (heads or 0) // axes["tensor"], axes["context"]),
        averaged=bool(config.averages(cfg)),
        param_dtype=options.get("param_dtype"),
        reduce_dtype=options.get("reduce_dtype"),
    )


def _adapts_all(cfg: DictConfig, cost: Cost) -> bool:
    """Return whether adapters of all the blocks' Linears are all that is trained, by a loss that
    `cost` is of.
    """
    adapter, known = cfg.task.adapter, str(cfg.task._target_) == LANGUAGE_MODELING
    ours = known and str(adapter.get("_target_")) == LORA
    return ours and bool(cost.linears) and not (adapter.get("targets") or adapter.get("train"))


def _optimizer(cfg: DictConfig) -> str:
    return str(cfg.optimizer._target_).rpartition(".")[2].lower()


def knows_optimizer(cfg: DictConfig) -> bool:
    """Return whether the state of the run's optimizer is known: of a class, and not one of the
    task's.
    """
    own = signatures.accepted(cfg.task, ["optimizer"])
    return _optimizer(cfg) in KNOWN_OPTIMIZERS and bool(own)


def _optimizer_bytes(cfg: DictConfig) -> tuple[int, int]:
    """Return bytes of fp32 state per parameter of hidden matrices, and of the rest.

    An unknown class counts as Adam.
    """
    name = _optimizer(cfg)
    if name == "sgd":
        state = MOMENTUM_BYTES if cfg.optimizer.get("momentum") else 0
        return state, state
    return (MOMENTUM_BYTES if name == "muon" else ADAM_BYTES), ADAM_BYTES
