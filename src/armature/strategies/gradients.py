"""Gradients under any strategy: weights of micro-batches by their targets, scaling, clipping and
norms.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from armature.checkpoint.optimizers import needs_closure
from armature.errors import ConfigError
from armature.parallel import gradients, process_group
from armature.parallel.scaler import SharedScaler
from armature.parallel.targets import TargetWeights
from armature.strategies.layout import LayoutMixin
from armature.strategies.update_mask import StepLeftOut, UpdateMask


class StepPrecision(Precision):
    """Mixed in before a precision plugin's class: lets the strategy scale and clip gradients."""

    strategy: "GradientMixin"

    @override
    def _after_closure(self, model: L.LightningModule, optimizer: Any) -> None:
        # on_before_optimizer_step, then clipping
        hooks_and_clipping = partial(super()._after_closure, model, optimizer)
        self.strategy.prepare_gradients(hooks_and_clipping, optimizer)

    @override
    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        self.strategy.clip_gradients(*args, **kwargs)


class GradientMixin(LayoutMixin):
    """Gradients as the unsharded model would have them, whatever the layout and the number of
    micro-batches.

    A loss is the mean over one micro-batch's targets. Where an optimizer step has several
    micro-batches, each loss is weighted by its number of targets, and once all targets are counted
    the gradients are multiplied by `gradient_scale`, before any hook reads them.

    Attributes:
        grad_norm: norm of the unsharded model's gradient before clipping, in this optimizer step;
            0-dim fp32. None if no step has been made since it was logged.
        target_weights: the numbers of targets in this step.
        steps_made: by each optimizer in this process, those that are left out included.
        on_nan: what happens to a step whose gradient is not finite: `ignore` makes its update,
            `stop` ends the run some steps later, `skip` leaves it out.
        update_mask: leaves out steps; with fp16 the loss scaler does, and the mask only restores
            buffers. None: nothing leaves out a step, or the scaler alone.
        masks_updates: whether `on_nan=skip` is possible.
    """

    precision_kind: ClassVar[type[StepPrecision]] = StepPrecision
    on_nan: str = "ignore"
    update_mask: UpdateMask | None = None
    masks_updates: bool = True
    grad_norm: Tensor | None
    target_weights: TargetWeights
    steps_made: Counter[Any]
    _trainer: L.Trainer
    _weighs_targets: Any  # False, True or a method of the module
    # training_step returned None, after which Lightning clips but the scaler makes no step
    _skips_step: bool = False
    # weights, and whether their gradients are reduced over the ranks; of one rank, none
    _reduced: Sequence[tuple[Tensor, bool]] = ()
    _mixtures: Sequence[Any] = ()  # models with experts, whose load is leveled (models/mixture)

    @override
    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        plugin: Any = self._own_precision()
        if type(getattr(plugin, "scaler", None)) is torch.amp.GradScaler:
            shared = SharedScaler(device=self.root_device.type)
            shared.load_state_dict(plugin.scaler.state_dict())
            plugin.scaler = shared
        self._trainer = trainer
        self._reduced = (
            [(p, p.requires_grad) for p in self.module.parameters()] if self.world_size > 1 else ()
        )
        self._weighs_targets = self.can_weigh_targets and getattr(
            self.module, "mean_over_targets", False
        )
        self.target_weights.reset()
        self.update_mask = self._make_mask()
        self._mixtures = [model for model in self.module.modules() if hasattr(model, "take_load")]

    def _own_precision(self) -> StepPrecision:
        """Return the precision plugin, as an object of `precision_kind` and its own class."""
        plugin: Any = self.precision_plugin
        if not isinstance(plugin, StepPrecision):
            kind = type(plugin)
            # the name stays: it is a key in checkpoints
            own = object.__new__(type(kind.__name__, (self.precision_kind, kind), {}))
            vars(own).update(vars(plugin))
            self.precision_plugin = plugin = own
        plugin.strategy = self
        return plugin

    # ------------------------------------------------------------ steps that are left out
    def _make_mask(self) -> UpdateMask | None:
        if (
            self.on_nan != "skip"
            or not self.module.automatic_optimization
            or not self.masks_updates
        ):
            return None
        for searches in filter(needs_closure, self.optimizers):
            raise ConfigError(
                f"trainer.on_nan=skip: {type(searches).__name__} changes the weights between "
                "several gradients of a step, which cannot be left out. Type trainer.on_nan=stop."
            )
        return UpdateMask(self.module)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Any, *args: Any, **kwargs: Any) -> Any:
        complete, result, left_out = self.completes_step, None, False
        self.steps_made[optimizer] += 1
        if needs_closure(optimizer):  # a line search compares losses, which are those of all ranks
            own, closure = closure, lambda: self.reduce(own())
        try:
            result = super().optimizer_step(optimizer, closure, *args, **kwargs)
        except StepLeftOut:  # of the mask
            left_out = True
        self._rebalance_experts(complete, left_out)
        if self.update_mask is not None:
            if self.scaler is not None:
                self.update_mask.left_out = self.skipped_step
            self.update_mask.step_ended()
        return result

    @property
    def completes_step(self) -> bool:
        """Whether the optimizer's step that is about to be made is one of the run's."""
        return True

    def _rebalance_experts(self, complete: bool, left_out: bool) -> None:
        """Let mixtures of experts level the load of the step that was made, which is added up over
        all ranks.

        Tokens are whole numbers, so their sums are the same under every layout. Ranks that compute
        the same count the same, which multiplies all sums alike. A mask restores the biases, which
        are buffers, if it leaves out the step.
        """
        for mixture in self._mixtures if complete else ():
            load_LE: Tensor = mixture.take_load(device=self.root_device)
            if not left_out:
                mixture.rebalance(process_group.all_sum(load_LE))

    @property
    def left_out(self) -> bool:
        """Whether the newest update was left out for a gradient that was not finite."""
        return self.update_mask is not None and self.update_mask.left_out

    # ------------------------------------------------------------ weights of micro-batches
    @property
    def can_weigh_targets(self) -> bool:
        """True if gradients can still be multiplied once all of a step's targets are counted."""
        return self.module.automatic_optimization

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's, after counting the batch's targets if it is one of several of an
        optimizer step.
        """
        if changed := [p for p, reduced in self._reduced if p.requires_grad != reduced]:
            self.reduce_changed(changed)
        weights = self.target_weights
        if self._weighs_targets and (
            self.data_size > 1 or self._trainer.accumulate_grad_batches > 1
        ):
            first = (
                self._trainer.fit_loop.epoch_loop.batch_idx % self._trainer.accumulate_grad_batches
                == 0
            )
            if first and not self.handles_gradient_accumulation:
                # an epoch may have been left within a step, and a closure may be called twice
                weights.reset()
            weights.count_batch(args[0], self._weighs_targets)
        if self.update_mask is not None:
            self.update_mask.step_begins()
        if self.scaler is not None:
            self.scaler.forget_unscaled()
        output = super().training_step(*args, **kwargs)
        self._skips_step = output is None and self.module.automatic_optimization
        return output

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if changed := [p for p, reduced in self._reduced if p.requires_grad and not reduced]:
            raise ConfigError(
                self._problem_of(
                    changed, "inside training_step", "unfreeze it in on_train_batch_start"
                )
            )
        loss = self.target_weights.weight_loss(
            closure_loss,
            micro_batches=self._trainer.accumulate_grad_batches,
            ranks=self.world_size,
        )
        if self.update_mask is not None:
            # a loss that is not finite makes all ranks' gradients NaN
            loss = loss * (1 + 0 * loss.detach())
        # a forward that is computed again would move BatchNorms' running statistics again
        norms = [x for x in self.module.modules() if getattr(x, "track_running_stats", False)]
        for norm in norms:
            norm.track_running_stats = False  # pyright: ignore[reportArgumentType]
        output = super().backward(loss, *args, **kwargs)
        for norm in norms:
            norm.track_running_stats = True  # pyright: ignore[reportArgumentType]
        return output

    # ------------------------------------------------------------ weights that are frozen or
    # unfrozen during training
    def reduce_changed(self, changed: Sequence[Tensor]) -> None:
        """Reduce the gradients of the weights that are trained now.

        Called by all ranks, between two steps.

        Args:
            changed: weights that were frozen or unfrozen since gradients were arranged to be
                reduced.

        Raises:
            ConfigError: if that is impossible.
        """
        raise ConfigError(self._problem_of(changed, "during training", "type strategy=ddp"))

    def _problem_of(self, changed: Sequence[Tensor], when: str, remedy: str) -> str:
        names = [
            name
            for name, param in self.module.named_parameters()
            if any(param is p for p in changed)
        ]
        return (
            f"{type(self.module).__name__}: {', '.join(names[:3])}{' …' if len(names) > 3 else ''} "
            f"is frozen or unfrozen {when}, which {self.layout} cannot follow: {remedy}, or train "
            "it from the first step on in a group whose learning rate is 0 while it is to stay as "
            "it is."
        )

    def gradient_scale(self) -> Tensor | None:
        """Return the factor to apply to this step's gradients before clipping (0-dim tensor), or
        None.

        All ranks must call it, between the backward of a step's last micro-batch and the next step.
        """
        return self.target_weights.gradient_scale(
            micro_batches=self._trainer.accumulate_grad_batches, ranks=self.world_size
        )

    # ------------------------------------------------------------ fp16's loss scaler
    @property
    def scaler(self) -> SharedScaler | None:
        scaler = getattr(self.precision_plugin, "scaler", None)
        return scaler if isinstance(scaler, SharedScaler) else None

    @property
    def scales_loss(self) -> bool:
        """Whether a gradient that is not finite is an ordinary overflow of fp16, after which the
        scale is lowered.
        """
        return self.scaler is not None

    def loss_scale(self) -> Tensor | None:
        """Return the factor that the next loss is multiplied by before backward (0-dim), or None
        without a scaler.
        """
        return (
            None
            if self.scaler is None
            else self.scaler.scale(torch.ones((), device=self.root_device))
        )  # pyright: ignore[reportReturnType]

    @property
    def skipped_step(self) -> bool:
        """Whether the newest optimizer step was left out on all ranks, because a gradient
        overflowed in fp16.
        """
        return self.scaler is not None and self.scaler.skipped and not self._skips_step

    # ------------------------------------------------------------ scaling and clipping
    def prepare_gradients(
        self, hooks_and_clipping: Callable[[], None], optimizer: Optimizer
    ) -> None:
        """Make a step's gradients those of the unsharded model, between backward and the step."""
        self.scale_gradients(optimizer)
        hooks_and_clipping()
        # the scaler leaves out the update itself
        if self.update_mask is not None and self.scaler is None:
            norm = self.grad_norm
            if norm is None:  # the module clips itself
                norm = self._norm_of(gradients.local_gradients(parameters_of(optimizer)))
            self.update_mask.apply(norm)

    def scale_gradients(self, optimizer: Optimizer) -> None:
        if (scale := self.gradient_scale()) is not None:
            gradients.multiply(gradients.local_gradients(parameters_of(optimizer)), by=scale)

    def clip_gradients(
        self, optimizer: Optimizer, clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:  # fmt: skip
        """Compute the gradient's norm, then clip.

        The precision plugin calls this before every step.

        Args:
            clip_val: norm or value to clip to; 0 or less: no clipping.
        """
        if isinstance(optimizer, LightningOptimizer):  # of self.optimizers()
            optimizer = optimizer.optimizer
        if self.scaler is not None and not self._skips_step:
            # Lightning leaves it to fused optimizers, and in manual optimization to the step, which
            # is after clipping
            self.scaler.unscale_(optimizer)
        parts = gradients.local_gradients(parameters_of(optimizer))
        self.grad_norm = norm = self._norm_of(parts)
        if clip_val > 0 and gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            gradients.clip_by_value(parts, value=clip_val)
        elif clip_val > 0:
            gradients.multiply(parts, by=(clip_val / (norm + 1e-6)).clamp(max=1.0))

    def _norm_of(self, parts: Sequence[gradients.Part]) -> Tensor:
        return gradients.total_norm(
            parts, ranks=self.ranks_per_stage, sharded=self.sharded, device=self.root_device
        )

    def norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the 2-norm of weights, or of tensors that are sharded like them, as if unsharded:
        0-dim, fp32. Called by all ranks.
        """
        return self._norm_of(gradients.local_parts(tensors))


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
