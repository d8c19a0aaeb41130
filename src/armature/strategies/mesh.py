"""Any mesh of pipeline, replicated, sharded, context and tensor axes: fsdp, hsdp, tensor, … and
their hybrids.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from typing_extensions import override

from armature.errors import ConfigError
from armature.parallel import (
    apply,
    batchnorm,
    gradients,
    mesh,
    sharded,
    units,
    whole_weights,
)
from armature.parallel.context import Positions
from armature.parallel.split import Schedule, bubble_share
from armature.strategies.base import StrategyMixin, models_of, move_others

log = logging.getLogger(__name__)

WHOLE = "within `with armature.whole_weights(self):` weights and gradients are ordinary tensors"
FEWER = (
    "type a larger strategy.min_num_params, below which weights stay whole on every rank, or "
    "strategy=ddp."
)
UNKNOWN = (
    f"torch cannot compute this with sharded weights or gradients. In a hook, {WHOLE}. If an "
    f"optimizer's step failed, leave its fused=True out, or take another one; or {FEWER}"
)
FREED = (
    "A gradient of a gradient (create_graph=True), or a block that returns an object of your own "
    f"class, needs weights that FSDP has freed. Return tensors or a dataclass; or {FEWER}"
)
# what to type after errors of torch's about sharded weights, by words of its message
REMEDIES = {
    sharded.MIXED:
        "A sharded weight was used outside of the forward of its block or large layer. Call that "
        "module. Outside of a loss numbers may stand beside it under torch.no_grad(), and "
        f"{WHOLE}. For a loss, {FEWER}",
    "Sharding propagation failed": UNKNOWN,
    "does not have a sharding strategy registered": UNKNOWN,
    ".numpy() is not supported for tensor subclasses":
        f"A sharded weight has no NumPy array. On all ranks, {WHOLE}; write the file on rank 0.",
    "Attempted to access the data pointer on an invalid python storage":
        "A sharded weight cannot be written to a file (safetensors, save_pretrained). On all "
        f"ranks, {WHOLE}; write the file on rank 0.",
    "FSDP does not support deepcopy":
        f"A sharded module was copied. Copy it in __init__ or configure_model, or {FEWER}",
    "gradient of a gradient": FREED,  # ours (parallel/apply.py)
    "storage of size 0": FREED,
    "its data is not allocated yet": FREED,  # from other operators
    "Timed out waiting":
        "All ranks must call sharded layers, and what gathers or reduces, equally often: pad what "
        f"a decoder loops over to one length; or {FEWER}",
    "appears to not have been used in the graph":
        "A unit's forward computes with gathered copies of its weights, of which "
        "torch.autograd.grad knows nothing. Call self.manual_backward(loss), which gives each "
        f"weight its .grad; or {FEWER}",
}  # fmt: skip


class MeshStrategy(StrategyMixin, ModelParallelStrategy):
    """Spread each model of the LightningModule over the ranks of a mesh, as its plan says.

    Args:
        pipe, replicate, shard, context, tensor: sizes of the axes; one may be "auto", which takes
            the remaining processes. The ranks of `context` share samples and shard their positions,
            and the weights like `shard`.
        context_method: how ranks of `context` attend to all positions: "all_to_all" over heads,
            "all_gather" of keys and values, or "auto": all_to_all while there are enough heads.
        expert: ranks that share out a mixture's experts. They are ranks of shard, context and
            tensor, no further ones.
        backend: `auto` (gloo on CPU, NCCL on GPU), or a backend's name.
        reshard_after_forward: free a block's gathered weights after forward (ZeRO-3), or keep them
            until backward (ZeRO-2); None: free them, except between a pipeline's micro-batches.
            Several models in one LightningModule always free them.
        reduce_every_microbatch: reduce gradients in every micro-batch of a step. False: only in the
            last one, which needs memory for unsharded gradients.
        param_dtype, reduce_dtype: types of gathered weights and of reduced gradients; None: bf16
            and fp32 with bf16 precision, fp16 and fp32 with 16-mixed, otherwise the weights' own.
        cpu_offload: keep sharded weights, gradients and optimizer state in the CPU's memory.
        prefetch: the number of units that are gathered ahead of the one that computes, forward
            and backward.
        min_num_params: of a unit (`parallel.units`), counted on one rank of the tensor axis. What
            is smaller stays whole on every rank: small messages are hardly faster than larger ones.
        sequence_parallel: shard norms, and activations between blocks, over the tensor axis too, if
            the plan can; "auto": except on CPUs.
        async_tensor: let compiled blocks overlap the collectives of sharded positions with matrix
            products; "auto": if the tensor axis's GPUs read each other's memory.
        schedule, microbatches, stages: of the pipeline; `stages` lists the number of blocks per
            stage, None balances.
        virtual_stages: stages of each rank, with the schedule interleaved_1f1b.
        sync_batchnorm, activation_checkpointing, compile, compile_mode, float8: as for every
            strategy.
    """

    replicates_weights = True
    remedies: ClassVar = REMEDIES

    def __init__(
        self,
        *,
        seed: int = 0,
        pipe: int | str = 1,
        replicate: int | str = 1,
        shard: int | str = 1,
        context: int | str = 1,
        tensor: int | str = 1,
        context_method: str = "auto",
        expert: int = 1,
        backend: str = "auto",
        reshard_after_forward: bool | None = None,
        reduce_every_microbatch: bool = True,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        cpu_offload: bool = False,
        prefetch: int = 1,
        min_num_params: int = 8_000_000,
        sequence_parallel: bool | str = "auto",
        async_tensor: bool | str = "auto",
        sync_batchnorm: bool = True,
        schedule: str = "1f1b",
        virtual_stages: int = 2,
        microbatches: int = 4,
        stages: Sequence[int] | None = None,
        activation_checkpointing: str | float = "none",
        compile: str = "none",
        compile_mode: str = "default",
        float8: bool | str = False,
    ) -> None:
        super().__init__(process_group_backend=None if backend == "auto" else backend)
        self.requested_sizes = {
            "pipe": pipe,
            "replicate": replicate,
            "shard": shard,
            "context": context,
            "tensor": tensor,
        }
        self.context_method = context_method
        self.reduce_every_microbatch, self.sync_batchnorm = reduce_every_microbatch, sync_batchnorm
        self.options: dict[str, Any] = {
            "seed": seed,
            "schedule": schedule,
            "virtual_stages": virtual_stages,
            "microbatches": microbatches,
            "stages": stages and list(stages),
            "sequence_parallel": sequence_parallel,
            "async_tensor": async_tensor,
            "reshard_after_forward": reshard_after_forward,
            "param_dtype": param_dtype,
            "reduce_dtype": reduce_dtype,
            "cpu_offload": cpu_offload,
            "prefetch": prefetch,
            "min_num_params": min_num_params,
            "expert": expert,
        }
        self.fetches_weights = cpu_offload
        # of each model one per pipeline stage that this rank holds; without a pipeline, the model
        self.parts: list[nn.Module] = []
        self.averaged: gradients.AveragedGradients | None = None
        self.positions: Positions | None = None
        self.expert_ranks: DeviceMesh | None = None
        self._run_contexts = ExitStack()
        self.configure_mixin(seed, activation_checkpointing, compile, compile_mode, float8)

    @override
    def setup_environment(self) -> None:
        self.join_group()
        self._setup_distributed()
        torch.manual_seed(self.seed)
        self.sizes = mesh.resolve(self.requested_sizes, world_size=self.world_size)
        option, expert = self.options["sequence_parallel"], self.options["expert"]
        self.options["sequence_parallel"] = mesh.shards_sequence(
            option, device=self.root_device.type, expert=expert
        )
        # a test after fit uses the same groups: each has buffers on a GPU
        if self._device_mesh is None:
            self._device_mesh = mesh.build(self.sizes, device_type=self.root_device.type)
            if self.sizes["context"] > 1:
                self.positions = Positions(
                    mesh.context_group(self._device_mesh, context=self.sizes["context"]),
                    method=self.context_method,
                )
            if expert > 1:
                self.expert_ranks = mesh.expert_mesh(self._device_mesh, expert=expert)
        self.module._device_mesh = self._device_mesh

    def _rank_on(self, axis: str) -> int:
        found = mesh.find_axis(self.device_mesh, axis)
        return 0 if found is None else found.get_local_rank()

    @property
    @override
    def data_size(self) -> int:
        return self.sizes["replicate"] * self.sizes["shard"]

    @property
    @override
    def data_rank(self) -> int:
        place = self._rank_on("shard") // self.sizes["context"]  # the mesh's axis is of both
        return self._rank_on("replicate") * self.sizes["shard"] + place

    @property
    @override
    def sample_ranks(self) -> list[int]:
        ranks = self.device_mesh.mesh.reshape([self.sizes[axis] for axis in mesh.AXES])
        context = self._rank_on("shard") % self.sizes["context"]  # the mesh's axis is of both
        return ranks[self.stage, :, :, context, self._rank_on("tensor")].flatten().tolist()

    @property
    @override
    def stage(self) -> int:
        return self._rank_on("pipe")

    @property
    @override
    def layout_notes(self) -> list[str]:
        return [f"expert={self.options['expert']}"] * (self.options["expert"] > 1) + [
            f"sequence_parallel={self.options['sequence_parallel']}".lower()
        ] * (self.sizes["tensor"] > 1)

    @property
    @override
    def can_generate(self) -> bool:
        # a pipeline, and shards of positions, only work on batches shaped like those of training
        positions = self.positions is not None or (
            self.sizes["tensor"] > 1 and self.options["sequence_parallel"]
        )
        return self.sizes["pipe"] == 1 and not positions

    @property
    @override
    def rng_stream(self) -> int:
        return self.data_rank * self.sizes["pipe"] + self.stage

    # ------------------------------------------------------------ building
    @override
    def build(self, module: L.LightningModule) -> None:
        # bf16-true: weights that are created from here on have this type
        self.precision_plugin.convert_module(module)
        sharded.guard()
        models = models_of(module)
        options = self._resolved(several=len(models) > 1)
        plans = {name: apply.plan_of(model) for name, model in models}
        if options.expert > 1 and not any(plan and plan.experts for plan in plans.values()):
            raise ConfigError(
                f"strategy.expert={options.expert}: {type(module).__name__} has no model with "
                "experts. Type strategy.expert=1."
            )
        if self.sync_batchnorm and self.data_size > 1:
            batchnorm.synchronize(module, group=mesh.data_group(self.device_mesh))
        attributes = {
            name: {**vars(param)} for name, param in module.named_parameters(remove_duplicate=False)
        }
        shared = _shared(models)
        for name, model in models:
            loaded = {
                each
                for each, _ in model.named_parameters(remove_duplicate=False)
                if not self.is_drawn(f"{name}.{each}")
            }
            runner = apply.parallelize(
                model,
                plans[name],
                self.device_mesh,
                options,
                device=self.root_device,
                prefix=f"{name}.",
                imported=self.imported[name] | loaded,
                positions=self.positions,
                expert_ranks=self.expert_ranks,
                listed=isinstance(module.get_submodule(name.rpartition(".")[0]), units.LISTS),
                shared=shared,
            )
            if runner is not None:
                runner.loss_scale = self.loss_scale
            self.parts += [model] if runner is None else runner.stages.parts
            whole_weights.accept(model)
        # sharded weights take over attributes, such as `_no_weight_decay` (S4, Mamba)
        for name, param in module.named_parameters(remove_duplicate=False):
            vars(param).update({**attributes.get(name, {}), **vars(param)})
        if self.sizes["pipe"] > 1:
            for _, model in models:
                sharded.refuse_pickled_states(model)
        self._replicate_others(
            module, {param for _, model in models for param in model.parameters()}
        )
        self.bubble_share = bubble_share(
            options.schedule, ranks=self.sizes["pipe"], microbatches=options.microbatches
        )

    @override
    def replicated_weights(self) -> dict[str, nn.Parameter]:
        if self.sizes["pipe"] > 1:
            return {}
        named = self.module.named_parameters()
        return {name: param for name, param in named if not isinstance(param, DTensor)}

    def _replicate_others(
        self, module: L.LightningModule, sharded: set[torch.nn.Parameter]
    ) -> None:
        """Average the gradients of weights that every rank has the whole of."""
        move_others(
            module,
            {part for _, model in models_of(module) for part in model.modules()},
            self.root_device,
        )
        others = {name: param for name, param in module.named_parameters() if param not in sharded}
        if others and self.sizes["pipe"] > 1:
            raise ValueError(
                f"strategy.pipe={self.sizes['pipe']}: {type(module).__name__} has parameters "
                "outside of its model, and no stage of the pipeline owns them: "
                f"{', '.join(others)}. Move them into the model."
            )
        if mesh.data_mesh(self.device_mesh).size() > 1:
            self.averaged = gradients.AveragedGradients(mesh.data_group(self.device_mesh))
            whole = [param for param in module.parameters() if not units.is_sharded(param)]
            self.averaged.add(whole if self.sizes["pipe"] == 1 else ())

    def _resolved(self, *, several: bool) -> apply.Options:
        """Return the options, with values in place of None.

        `several`: the LightningModule has more than one model.
        """
        # a pipeline needs weights until the end of all micro-batches
        several = several and self.sizes["pipe"] == 1
        options = self.options | {
            name: getattr(self, name)
            for name in ("activation_checkpointing", "compile", "compile_mode", "float8")
        }
        options["keep_last_gathered"] = not several
        options["schedule"] = Schedule.of(options)
        del options["virtual_stages"]
        gathered = mesh.GATHERED_IN.get(str(self.precision_plugin.precision))
        for key, default in (("param_dtype", gathered), ("reduce_dtype", gathered and "float32")):
            name = options[key] or default
            options[key] = name and getattr(torch, name)
        if several and options["reshard_after_forward"] is False:
            log.warning(
                "strategy.reshard_after_forward=false does not apply to a LightningModule with "
                "several models, whose "
                "weights may change between their forwards. They are resharded after forward."
            )
        if several or options["reshard_after_forward"] is None:
            options["reshard_after_forward"] = self.sizes["pipe"] == 1
        return apply.Options(**options)

    @override
    def setup(self, trainer: L.Trainer) -> None:
        if not is_overridden("configure_model", self.module):  # the model was built in __init__
            self.module.__dict__["configure_model"] = lambda: None
        if self.sizes["tensor"] > 1:
            self._run_contexts.enter_context(loss_parallel())  # backward needs it too
        super().setup(trainer)

    @override
    def model_to_device(self) -> None:
        """Nothing: `build` has placed everything, offloaded weights not on the device."""

    @override
    def teardown(self) -> None:
        self._run_contexts.close()
        super().teardown()

    @override
    def return_to_device(self) -> None:
        """Nothing: sharded weights stay where they are."""

    # ------------------------------------------------------------ steps
    @override
    def reduce_changed(self, changed: Sequence[Tensor]) -> None:
        """FSDP reduces the gradients of all of its weights that are trained."""
        unfrozen = [param for param in changed if param.requires_grad]
        divided = self.sizes["tensor"] > 1 or self.options["expert"] > 1
        if self.sizes["pipe"] > 1 or (unfrozen and divided):
            super().reduce_changed(unfrozen or changed)
        if not unfrozen:
            return  # FSDP may still reduce them later
        for part in self.parts:
            apply.learn_gradient_types(part)
        if self.averaged is not None:
            self.averaged.add(param for param in unfrozen if not units.is_sharded(param))
        self._reduced = [
            (param, reduced or param.requires_grad) for param, reduced in self._reduced
        ]

    @override
    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        with ExitStack() as stack:

            def compute_and_split() -> Any:
                result = closure()
                stack.enter_context(gradients.split_groups(optimizer))
                return result

            result = super().optimizer_step(optimizer, compute_and_split, *args, **kwargs)
        for part in self.parts if self.sizes["pipe"] == 1 else ():
            whole_weights.reshard(part)
        return result

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        parts = [] if self.reduce_every_microbatch or self.sizes["pipe"] > 1 else self.parts
        switched = [part for part in parts if isinstance(part, FSDPModule)]
        for part in switched:
            part.set_requires_gradient_sync(False)
        if self.averaged is not None:
            self.averaged.enabled = False
        try:
            yield
        finally:
            for part in switched:
                part.set_requires_gradient_sync(True)
            if self.averaged is not None:
                self.averaged.enabled = True


def _shared(models: Sequence[tuple[str, nn.Module]]) -> list[nn.Parameter]:
    """Return the weights that several models have, such as an embedding's tied to a head beside it.

    All others are let go: their models replace them.
    """
    counts = Counter(param for _, model in models for param in model.parameters())
    return [param for param, count in counts.items() if count > 1]
