"""The contents of checkpoints under any strategy, and loading them in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from armature.checkpoint import state
from armature.checkpoint.writer import CheckpointWriter
from armature.parallel import process_group
from armature.parallel.randomness import RankRandomState
from armature.strategies.layout import LayoutMixin


class CheckpointMixin(LayoutMixin):
    """Checkpoints that every layout can read.

    Attributes:
        random_state: this rank's random state of the loaded checkpoint, which training restores before its first draw.
    """

    seed: int
    random_state: RankRandomState
    _extra_state: dict[str, Callable[[], Mapping[str, Tensor]]]
    restore_checkpoint_after_setup = True  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    lightning_restore_optimizer = False  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]

    def register_extra_state(self, name: str, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """Save tensors with the weights as `extra.<name>.<key>`, and fill them when a checkpoint is loaded.

        `tensors` is called at each save and load, and returns the tensors by their keys.
        """
        self._extra_state[name] = tensors

    def extra_tensors(self) -> dict[str, Tensor]:
        """Return the registered tensors under their names in checkpoints."""
        registered = self._extra_state.items()
        return {f"{state.EXTRA}.{name}.{key}": value for name, call in registered for key, value in call().items()}

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return state.module_state(self.module, buffers=self.data_rank == 0)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state tensors by parameter name, and the groups' hyperparameters with their parameters' names."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        names, index = state.parameter_names(self.module), self.optimizers.index(optimizer)
        tensors = state.optimizer_state(optimizer, names, index=index)
        return {"tensors": tensors, "groups": state.param_groups(optimizer, state.group_names(optimizer, names))}

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write the directory `filepath`. All ranks must call this with the same path.

        Args:
            storage_options: the `CheckpointWriter` of the run's own checkpoints; None: write in the foreground, and
                leave `last` as it is.
        """
        if not isinstance(storage_options, CheckpointWriter | None):
            raise TypeError(f"storage_options must be a CheckpointWriter or None. Got {storage_options!r}")
        meta = dict(checkpoint)
        tensors = meta.pop("state_dict") | self.extra_tensors()
        groups = []
        for saved in meta.pop("optimizer_states", []):
            tensors |= saved["tensors"]
            groups.append(state.merge_groups(process_group.all_gather_object(saved["groups"])))
        meta |= {"param_groups": groups, "random": self.random_state.gather(self.layout)}
        directory = Path(filepath) if isinstance(filepath, str) else filepath  # an object store's path remains one
        entries = {"step": meta.get("completed_batches", meta.get("global_step")), "strategy": self.layout}
        (storage_options or CheckpointWriter()).save(directory, tensors, meta, entries=entries)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load weights and optimizer state in place, and return the rest of Lightning's checkpoint."""
        directory = Path(checkpoint_path) if isinstance(checkpoint_path, str) else checkpoint_path
        return self.load_random_state(state.load(directory, self.module, self.optimizers, extra=self.extra_tensors()))

    def load_random_state(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Move the random states out of a loaded checkpoint into `random_state`, and return the rest."""
        saved, step = meta.pop("random", None), meta.get("global_step", 0)
        self.random_state.load(saved, layout=self.layout, seed=self.seed, stream=self.rng_stream, step=step)
        return meta

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: `load_checkpoint` has loaded the weights."""

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` has loaded the optimizer's state."""
