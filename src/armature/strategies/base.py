"""What every strategy does alike: initial weights by name, gradient norm and clipping, checkpoints, random streams.

Mixed in before one of Lightning's strategies: `class DDP(StrategyMixin, DDPStrategy)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from armature.checkpoint import background
from armature.checkpoint import state as ckpt
from armature.optim.muon import Muon
from armature.parallel import apply, blocks, gradients, process_group, randomness
from armature.parallel import initialization as initialization
from armature.parallel.distributed_matrices import DistributedMatrices
from armature.parallel.targets import TargetWeights

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base  # whatever the mixin is mixed into has its attributes
else:
    _Base = object


GRADIENT_HOOKS = ("on_before_optimizer_step", "configure_gradient_clipping")  # hooks that gradients are finished for


class StrategyMixin(_Base):
    """The part that all strategies share.

    Attributes:
        seed: decides the initial weights and the random streams.
        grad_norm: norm of the undivided model's gradient before clipping, of the last optimizer step; 0-dim fp32.
        gradients_are_scaled: by `gradient_scale`, in this step.
        data_size, data_rank: the data axis. Batch arithmetic uses it, never the number of processes.
        initial_weights: a checkpoint to begin with instead of the seed's weights.
        facts: what a checkpoint's manifest says of the run.
        published: called on rank 0 with a checkpoint's directory, once it is complete and has its name.
        save_in_background: a save then costs the step a copy; `published` runs in another thread.
        parameter_count: of the undivided model, whatever part of it is here.
        bubble_share: share of a step that the pipeline's schedule leaves idle; 0 without a pipeline.
    """

    seed: int
    grad_norm: Tensor
    _trainer: L.Trainer
    _data_ranks: int
    _weighs: bool
    bubble_share: float = 0.0

    def configure_mixin(
        self,
        *,
        seed: int,
        activation_checkpointing: str | int = "none",
        compile: str = "none",
        compile_mode: str = "default",
        float8: bool | str = False,
    ) -> None:
        """Called by constructors, after Lightning's own.

        Args:
            activation_checkpointing: none; every block; n, for every n-th; or selective, which recomputes all but
                matrix products and attention.
            compile: none, block (each block by itself) or model (all of it).
            compile_mode: torch.compile's.
            float8: whether the blocks' matrix products run in float8; "emulate" computes what they would give.
        """
        self.seed = seed
        self.activation_checkpointing = activation_checkpointing
        self.compile, self.compile_mode, self.float8 = compile, compile_mode, float8
        self.parameter_count = 0
        self.grad_norm = torch.zeros(())
        self.target_weights, self.gradients_are_scaled = TargetWeights(), False
        self._hooks_read_gradients = False
        self.initial_weights: Path | None = None
        self.facts: dict[str, Any] = {}
        self.published: Callable[[Path], None] | None = None
        self.save_in_background = False
        self._saver = background.BackgroundSaver()
        self.extra_state: dict[str, Callable[[], Mapping[str, Tensor]]] = {}
        self._random: dict[str, Any] | None = None  # of this rank, from the checkpoint
        self.cluster_environment = process_group.RankEnvironment()

    @property
    def module(self) -> L.LightningModule:
        """The LightningModule itself, without what a strategy wraps around it."""
        assert self.lightning_module is not None
        return self.lightning_module

    # ------------------------------------------------------------ the layout, for gradients and data
    @property
    def data_size(self) -> int:
        return self.distributed_sampler_kwargs["num_replicas"]

    @property
    def data_rank(self) -> int:
        return self.distributed_sampler_kwargs["rank"]

    @property
    def ranks_per_stage(self) -> int:
        """How many ranks hold one pipeline stage, or all of the model, among them."""
        return self.world_size

    @property
    def divided(self) -> bool:
        """Whether ranks hold different parts of the model."""
        return False

    @property
    def can_generate(self) -> bool:
        """Whether the model may be called with any number of positions and a cache, on all ranks alike."""
        return True

    @property
    def rng_stream(self) -> int:
        """Which random stream this rank draws from. Ranks that compute the same must draw the same."""
        return self.data_rank

    # ------------------------------------------------------------ building
    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        torch.manual_seed(self.seed)  # a model that is not initialized by name is built alike on every rank

    @override
    def setup(self, trainer: L.Trainer) -> None:
        if not getattr(self.module, "_armature_built", False):
            self.parameter_count = sum(param.numel() for param in self.module.parameters())
            self.build(self.module)
            if self.initial_weights is not None:
                ckpt.load(self.initial_weights, self.module, [])
            self.module.__dict__["_armature_built"] = True
        super().setup(trainer)
        for optimizer in self.optimizers:
            if isinstance(optimizer, Muon):
                optimizer.matrix_work = self.matrices()
        # an attribute of the instance: plugins are many, and each one's class names its state in checkpoints
        plugin = self.precision_plugin
        plugin.clip_gradients = self.clip_gradients
        plugin._after_closure = partial(self._after_closure, partial(type(plugin)._after_closure, plugin))  # pyright: ignore[reportAttributeAccessIssue]
        self._trainer, self._data_ranks = trainer, self.data_size
        self._weighs = self.can_weigh and getattr(self.module, "mean_over_targets", False)
        self.target_weights.reset()
        self._hooks_read_gradients = any(is_overridden(hook, self.module) for hook in GRADIENT_HOOKS) or any(
            is_overridden(GRADIENT_HOOKS[0], callback) and not type(callback).__module__.startswith("armature.")
            for callback in trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        )
        if trainer.state.fn == TrainerFn.FITTING:
            randomness.begin(seed=self.seed, stream=self.rng_stream)

    def build(self, module: L.LightningModule) -> None:
        """Give the module its weights. Called once, after configure_model and before the optimizers are made."""
        for _, model in models_of(module):
            repeated = apply.repeated_blocks(model, apply.plan_of(model))
            blocks.convert_to_float8(repeated, float8=self.float8)
            blocks.checkpoint_activations(repeated, mode=self.activation_checkpointing)
            if self.compile != "none":
                blocks.compile_forward(repeated if self.compile == "block" else [model], mode=self.compile_mode)
        meta_names = initialization.materialize(module, device=self.root_device)
        initialization.initialize_by_name(module, seed=self.seed, names=meta_names)

    def weights(self) -> dict[str, nn.Parameter]:
        """This rank's part of the weights by name, as the optimizer steps them; none is gathered afterwards."""
        return {name: param for param, name in ckpt.parameter_names(self.module).items()}  # pyright: ignore[reportReturnType]

    def matrices(self) -> DistributedMatrices:
        """Who works on which whole matrix in the optimizer."""
        return DistributedMatrices()

    # ------------------------------------------------------------ gradients
    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's. Where the batch is one of several of an optimizer step, its targets are counted."""
        weights = self.target_weights
        if self._weighs and (self._data_ranks > 1 or self._trainer.accumulate_grad_batches > 1):
            weights.count_batch(args[0])
            self.gradients_are_scaled = False
        elif weights.batch_targets is not None:  # accumulation has ended
            weights.reset()
        return super().training_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        micro_batches = self._trainer.accumulate_grad_batches
        loss = self.target_weights.weight_loss(closure_loss, micro_batches=micro_batches, ranks=self.world_size)
        return super().backward(loss, *args, **kwargs)

    def gradient_scale(self) -> Tensor | None:
        """What this step's gradients are to be multiplied by until they are clipped, 0-dim; None: nothing.

        Asked for by all ranks, between the backward of a step's last micro-batch and the next step.
        """
        micro_batches = self._trainer.accumulate_grad_batches
        return self.target_weights.gradient_scale(micro_batches=micro_batches, ranks=self.world_size)

    @property
    def can_weigh(self) -> bool:
        """Whether gradients can still be multiplied once all of a step's targets are counted."""
        return self.module.automatic_optimization

    def _after_closure(self, lightnings: Callable[..., None], module: L.LightningModule, optimizer: Optimizer) -> None:
        if self._hooks_read_gradients:
            self.scale_gradients(optimizer)  # else clipping does it in its own pass
        lightnings(module, optimizer)
        if not self.gradients_are_scaled:
            self.scale_gradients(optimizer)

    def scale_gradients(self, optimizer: Optimizer) -> None:
        """Multiply the gradients by `gradient_scale`."""
        scale, self.gradients_are_scaled = self.gradient_scale(), True
        if scale is not None:
            gradients.multiply(gradients.local_gradients(parameters_of(optimizer)), by=scale)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Note the gradient's norm, scale and clip. Lightning's precision plugin calls this before every step."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.unscale_(optimizer)  # Lightning leaves it to fused optimizers, which then could not be clipped
        parts = gradients.local_gradients(parameters_of(optimizer))
        factor, self.gradients_are_scaled = None if self.gradients_are_scaled else self.gradient_scale(), True
        self.grad_norm = gradients.total_norm(
            parts, ranks=self.ranks_per_stage, sharded=self.divided, device=self.root_device
        )
        if factor is not None:
            self.grad_norm = self.grad_norm * factor
        by_value = gradient_clip_algorithm == GradClipAlgorithmType.VALUE
        if clip_val and not by_value:
            shrink = (clip_val / (self.grad_norm + 1e-6)).clamp(max=1.0)
            factor = shrink if factor is None else shrink * factor  # one pass for both
        if factor is not None:
            gradients.multiply(parts, by=factor)
        if clip_val and by_value:
            gradients.clip_by_value(parts, value=clip_val)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        # the mean of whole numbers would be cut to one: `self.log(…, sync_dist=True)` counts its samples so
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and reduce_op in ("mean", "avg"):
            tensor = tensor.float()
        return super().reduce(tensor, group, reduce_op)

    # ------------------------------------------------------------ checkpoints
    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return ckpt.module_state(self.module, buffers=self.data_rank == 0)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state tensors by parameter name, and the groups' hyperparameters with the names in each."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        names, index = ckpt.parameter_names(self.module), self.optimizers.index(optimizer)
        tensors = ckpt.optimizer_state(optimizer, names, index=index)
        return {"tensors": tensors, "groups": ckpt.param_groups(optimizer, ckpt.group_names(optimizer, names))}

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write the directory `filepath`; every rank must call it, with the same path."""
        meta = dict(checkpoint)
        tensors = meta.pop("state_dict") | self.extra_tensors()
        groups = []
        for state in meta.pop("optimizer_states", []):
            tensors |= state["tensors"]
            groups.append(ckpt.merge_groups(process_group.all_gather_object(state["groups"])))
        meta["param_groups"] = groups
        meta["random"] = {"layout": self.layout, "ranks": process_group.all_gather_object(randomness.capture())}
        directory = Path(filepath) if isinstance(filepath, str) else filepath
        facts = {"step": meta.get("global_step"), "strategy": self.layout, **self.facts}
        if self.save_in_background:
            self._saver.start(directory, tensors, meta, facts=facts, published=self.published)
            return
        ckpt.save(directory, tensors, meta, facts=facts)
        if self.published is not None and process_group.rank() == 0:
            self.published(directory)

    def finish_saves(self) -> None:
        """Wait for what is being saved in the background; all ranks call it."""
        self._saver.finish()

    @override
    def teardown(self) -> None:
        self.finish_saves()
        super().teardown()

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load weights and optimizer state in place, and give back the rest of Lightning's checkpoint."""
        directory = Path(checkpoint_path) if isinstance(checkpoint_path, str) else checkpoint_path
        return self.note_random(ckpt.load(directory, self.module, self.optimizers, extra=self.extra_tensors()))

    def note_random(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Keep this rank's random state of a checkpoint until `restore_random`; give back the rest.

        Under another layout ranks draw other numbers anyway. They then begin streams of the checkpoint's step.
        """
        saved = meta.pop("random", None)
        if saved is not None and saved["layout"] == self.layout and len(saved["ranks"]) == process_group.ranks():
            self._random = saved["ranks"][process_group.rank()]
        else:
            randomness.begin(seed=self.seed, stream=self.rng_stream, step=meta.get("global_step", 0))
            self._random = randomness.capture()
        return meta

    def restore_random(self) -> None:
        """Draw on where the checkpoint was saved (or `hold_random` called): nothing more is drawn for the set-up."""
        if self._random is not None:
            randomness.restore(self._random)
            self._random = None

    def hold_random(self) -> None:
        """What is drawn from here to `restore_random` is forgotten."""
        self._random = randomness.capture()

    @property
    def layout(self) -> str:
        """The class, with a mesh's axes that are longer than 1."""
        sizes = [f"{axis}={size}" for axis, size in getattr(self, "sizes", {}).items() if size > 1]
        return " ".join([type(self).__name__, *sizes])

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: load_checkpoint has done it."""

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: load_checkpoint has done it."""

    def extra_tensors(self) -> dict[str, Tensor]:
        """What callbacks keep beside the weights, under the names it has in checkpoints."""
        return {
            f"{ckpt.EXTRA}.{kind}.{name}": value
            for kind, tensors in self.extra_state.items()
            for name, value in tensors().items()
        }


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """What the optimizer steps."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def models_of(module: L.LightningModule) -> list[tuple[str, nn.Module]]:
    """The LightningModule's children that have weights, with their names."""
    return [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
