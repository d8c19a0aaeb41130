"""The contents of checkpoints under any strategy, and loading them in place."""

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from armature.checkpoint import (
    directory,
    lightning_file,
    optimizers,
    plain,
    resume,
    schedules,
    state,
    storage,
)
from armature.checkpoint.writer import CheckpointWriter
from armature.errors import ConfigError
from armature.finetune import base
from armature.models.adapters import is_adapter
from armature.parallel import process_group
from armature.parallel.randomness import RankRandomState
from armature.strategies.gradients import parameters_of
from armature.strategies.layout import LayoutMixin
from armature.training.progress import completed_batches, feed_of

SCHEDULES = "lr_schedulers"


class CheckpointMixin(LayoutMixin):
    """Checkpoints that every layout can read.

    As in Lightning, weights, data and callbacks are restored before `on_fit_start`, the optimizers'
    state after it.

    Attributes:
        random_state: this rank's random state of the loaded checkpoint, which training restores
            before its first draw.
        built_groups: the settings of each optimizer's groups when it was set up.
        saves_files: whether `trainer.save_checkpoint("x.ckpt")` can write one file: every rank
            holds the whole model.
        base: what a checkpoint's manifest says of the folder that frozen weights came from
            (`finetune.base.record`). The checkpoint then leaves these weights out. None: it holds
            all weights.
        from_base: the weights that came from folders at this start, by name. A checkpoint that is
            loaded may lack them.
        frozen_base: those of them that were frozen then.
        before_loading: called with a checkpoint that has been read, before anything loads it.
        loads_optimizers_last: leave the optimizers as they are, since the checkpoint is loaded once
            more after all hooks of the start.
    """

    seed: int
    random_state: RankRandomState
    built_groups: Sequence[list[dict[str, Any]]] = ()
    _gradients: dict[Tensor, Tensor] | None = None
    saves_files: bool = False
    base: Mapping[str, str] | None = None
    from_base: Set[str] = frozenset()
    frozen_base: Set[str] = frozenset()
    _extra_state: dict[str, Callable[[], Mapping[str, Tensor]]]
    _loading: Path | None = None  # between `load_checkpoint` and the optimizers' state
    before_loading: Callable[[dict[str, Any]], None] = staticmethod(lambda checkpoint: None)
    loads_optimizers_last: bool = False
    restore_checkpoint_after_setup = False  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    lightning_restore_optimizer = True  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]

    def build_once(self) -> None:
        """Build the model unless it is built."""
        raise NotImplementedError

    def inner_optimizers(self) -> list[Any]:
        """Return the optimizers whose parameter groups checkpoints hold."""
        return [*self.optimizers]

    def register_extra_state(self, name: str, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """Save tensors with the weights as `.extra.<name>.<key>`, and fill them when a checkpoint
        is loaded.

        `tensors` is called at each save and load, and returns the tensors by their keys.
        """
        self._extra_state[name] = tensors

    def extra_tensors(self) -> dict[str, Tensor]:
        """Return the registered tensors under their names in checkpoints."""
        registered = self._extra_state.items()
        return {
            f"{state.EXTRA}.{name}.{key}": value
            for name, call in registered
            for key, value in call().items()
        }

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return state.module_state(self.module, buffers=self.data_rank == 0)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the entry of meta.pt: the groups' hyperparameters with their parameters' names,
        and for now the state tensors by parameter name. Or its whole state.
        """
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        index = self.optimizers.index(optimizer)
        if optimizers.is_saved_whole(optimizer):
            if not self.saves_files:  # it was not known before
                optimizers.refuse_parts(optimizer)
            return optimizers.whole_state(optimizer, self.built_groups[index])
        names = state.parameter_names(self.module)
        # a hook may have unfrozen a weight
        optimizers.check(optimizer, names, held=self.module.state_dict())
        of_groups = optimizers.group_names(optimizer, names)
        return {
            optimizers.TENSORS: optimizers.by_weight(optimizer, names, index=index),
            "param_groups": optimizers.param_groups(optimizer, of_groups, self.built_groups[index]),
        }

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint. All ranks must call this with the same path.

        Args:
            filepath: where a checkpoint that is not the run's own is written: one file in
                Lightning's form if it is named like one (`x.ckpt`) and every rank holds the whole
                model, otherwise a directory.
            storage_options: the `CheckpointWriter` of the run's own checkpoints; None: write in the
                foreground, and leave `last` as it is.

        Raises:
            ConfigError: a module or callback put something into it that is not plain, or whose name
                is one of ours.
        """
        if not isinstance(storage_options, CheckpointWriter | None):
            raise TypeError(
                f"storage_options must be a CheckpointWriter or None. Got {storage_options!r}"
            )
        if storage_options is None:
            # ModelCheckpoint's holds a metric of this rank
            filepath = process_group.broadcast_object(filepath)
        path, (meta, tensors) = resume.to_path(filepath), _parts_of(checkpoint, self.module)
        if storage_options is None and self.saves_files and directory.is_named_as_file(path):
            self._save_file(path, checkpoint, meta, tensors)
            return
        left_out = self.unchanged_base()
        tensors = {name: value for name, value in tensors.items() if name not in left_out}
        tensors |= self.extra_tensors() | self._optimizer_tensors(checkpoint)
        meta |= self._entries(checkpoint)
        trainer = self.module.trainer
        entries = {"step": completed_batches(trainer), "strategy": self.layout}
        entries |= {"samples": feed.samples_seen} if (feed := feed_of(trainer)) else {}
        entries |= {base.KEY: dict(self.base)} if self.base and self.frozen_base else {}
        (storage_options or CheckpointWriter()).save(path, tensors, meta, entries=entries)

    def _save_file(
        self, path: Path, checkpoint: dict[str, Any], meta: dict[str, Any], weights: dict[str, Any]
    ) -> None:
        """Write one file in Lightning's form, on rank 0."""
        if state.OPTIMIZER in checkpoint:
            own = {state.OPTIMIZER: [optimizer.state_dict() for optimizer in self.optimizers]}
            meta |= plain.plain_checkpoint(own)
        meta[SCHEDULES] = [*map(schedules.without_held, meta.get(SCHEDULES, ()))]
        meta["state_dict"] = weights | meta.pop(state.OTHER, {})
        process_group.on_rank_0(partial(lightning_file.write, path, meta))

    def _optimizer_tensors(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the optimizers' state by weight, with gradients that the next step may use."""
        found: dict[str, Any] = {}
        # else Lightning sets the gradients of earlier batches to None
        keeps_gradients = not self.module.automatic_optimization or is_overridden(
            "optimizer_zero_grad", self.module
        )
        if keeps_gradients and state.OPTIMIZER in checkpoint:
            found |= state.pending_gradients(self.module)
        for saved in checkpoint.get(state.OPTIMIZER, ()):
            found |= saved.pop(optimizers.TENSORS, {})
        return found

    def _entries(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return our entries of meta.pt on rank 0, which writes it, and nothing elsewhere: what all
        ranks know of the modules that they have.
        """
        own = checkpoint.get(state.OPTIMIZER, ())
        parts = [[] if optimizers.BUILT in each else each["param_groups"] for each in own]
        everyones = process_group.gather_object((parts, self.random_state.current()))
        if not everyones:
            return {}
        of_ranks, random = zip(*everyones, strict=True)
        groups = [optimizers.merge_groups([*of]) for of in zip(*of_ranks, strict=True)]
        saved = [
            {optimizers.CLASS: optimizers.class_of(optimizer)}
            | (each if optimizers.BUILT in each else {"param_groups": merged})
            for optimizer, each, merged in zip(self.inner_optimizers(), own, groups, strict=False)
        ]
        return {
            state.RANDOM: {"layout": self.layout, "ranks": [*random]},
            **plain.plain_checkpoint({state.OPTIMIZER: saved}),
        }

    def unchanged_base(self) -> set[str]:
        """Return the weights that checkpoints leave out: those that are as they were in the base
        model.
        """
        if self.base is None:
            return set()
        stepped = {
            param
            for each in self.optimizers
            if isinstance(each, Optimizer)
            for param in _stepped(each)
        }
        own = state.state_of_parameters(self.module)
        changed = {
            n for n, v in own.items() if isinstance(v, Tensor) and (v.requires_grad or v in stepped)
        }
        return {*self.frozen_base} - changed

    # ------------------------------------------------------------ loading
    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return Lightning's checkpoint.

        Its `state_dict` holds this rank's tensors if anybody may want to change them.

        Otherwise it has none, and `load_model_state_dict` loads the weights in place, without a
        second copy.
        """
        checkpoint = self._read_checkpoint(resume.to_path(checkpoint_path))
        plain.remake(self.module, checkpoint)
        self.before_loading(checkpoint)
        return checkpoint

    def _read_checkpoint(self, path: Path) -> dict[str, Any]:
        self._loading = None
        self.build_once()
        if directory.is_file(path):
            return lightning_file.read(path)
        storage.keep_metadata(path)
        meta = plain.restored(storage.read_meta(path))
        self.random_state.load(
            meta.pop(state.RANDOM, None),
            layout=self.layout,
            seed=self.seed,
            stream=self.rng_stream,
            step=meta.get("global_step", 0),
        )
        meta.setdefault(state.OPTIMIZER, [])
        state.resize_buffers(path, self.module)
        if self._hooks_change_weights or not self.restore_checkpoint_after_setup:
            meta["state_dict"] = self.read_weights(path)
        self._loading = path
        return meta

    def read_weights(self, path: Path) -> dict[str, Any]:
        """Return a checkpoint's weights: in new tensors if hooks may change them."""
        return state.read_weights(path, self.module, in_place=not self._hooks_change_weights)

    @property
    def _hooks_change_weights(self) -> bool:
        owners = (self.module, *self.module.trainer.callbacks)  # pyright: ignore[reportAttributeAccessIssue]
        return any(is_overridden("on_load_checkpoint", owner) for owner in owners)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights, as `on_load_checkpoint` of the module left them."""
        fits, weights = self.module.trainer.state.fn == TrainerFn.FITTING, checkpoint["state_dict"]
        # users' `on_fit_start` may make modules and buffers, before the second load
        strict = strict and not (fits and self.loads_optimizers_last)
        state.place_weights(
            self._loading or Path("the .ckpt file"),
            self.module,
            weights,
            strict=strict,
            may_lack=self.from_base.__contains__,
        )
        if self._loading is not None and not fits:
            optimizers.load_optimizers(
                self._loading, self.module, [], saved=[], extra=self.extra_tensors()
            )
            storage.forget_metadata()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' state, and the tensors that callbacks have registered in
        `on_fit_start`.
        """
        if self.loads_optimizers_last:
            return
        path, self._loading = self._loading, None
        if path is None:  # a file, which holds them as Lightning does
            super().load_optimizer_state_dict(checkpoint)
            return
        self._gradients = optimizers.load_optimizers(
            path,
            self.module,
            self.optimizers,
            saved=checkpoint[state.OPTIMIZER],
            built=self.built_groups,
            extra=self.extra_tensors(),
        )

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self.loading_ended()

    def loading_ended(self) -> None:
        """Put pending gradients in place, once; not before the loops run: Lightning sets them to
        None before.
        """
        storage.forget_metadata()
        gradients, self._gradients = self._gradients or {}, None
        for param, gradient in gradients.items():
            param.grad = gradient.detach()

    def load_initial_weights(self, path: Path) -> None:
        """Load the weights alone; of a .ckpt after the module's `on_load_checkpoint`, which may
        rename them.

        Adapters that the checkpoint does not have begin anew.
        """
        if directory.is_file(path):
            checkpoint = lightning_file.read(path)
            plain.remake(self.module, checkpoint)
            self.module.on_load_checkpoint(checkpoint)
            weights, strict = checkpoint["state_dict"], self.module.strict_loading
        else:
            state.resize_buffers(path, self.module)
            weights, strict = state.read_weights(path, self.module, in_place=True), True
        state.place_weights(
            path,
            self.module,
            weights,
            strict=strict,
            may_lack=lambda name: is_adapter(name) or name in self.from_base,
        )


def _parts_of(
    checkpoint: dict[str, Any], module: L.LightningModule
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return Lightning's entries made plain, with what modules keep beside tensors, and the
    weights.
    """
    rest = {k: v for k, v in checkpoint.items() if k not in ("state_dict", state.OPTIMIZER)}
    if taken := [key for key in rest if str(key).startswith(state.RESERVED)]:
        raise ConfigError(
            f"checkpoint['{taken[0]}']: entries that begin with '{state.RESERVED}' are ours. "
            "Type another key in on_save_checkpoint."
        )
    if SCHEDULES in rest:
        rest[SCHEDULES] = [*map(schedules.without_objects, rest[SCHEDULES])]
    weights = checkpoint["state_dict"]
    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    if others := {name: value for name, value in weights.items() if name not in tensors}:
        rest[state.OTHER] = others
    return plain.plain_checkpoint(rest, module=module), tensors


def _stepped(optimizer: Optimizer) -> set[Tensor]:
    """Return the parameters that an optimizer may have changed: all of its own, if state does not
    tell which.
    """
    own = {*parameters_of(optimizer)}
    # SGD without momentum has none
    tells = bool(optimizer.state) and not optimizers.is_saved_whole(optimizer)
    return {param for param in own if param in optimizer.state} if tells else own
