"""What a plain LightningDataModule sees of the Trainer while it builds its data."""

from __future__ import annotations

from typing import Any

from armature.errors import ConfigError

_BY_EPOCH = (
    "For data that change by epoch, let the dataset read an attribute of its own, and set it in "
    "on_train_epoch_start "
    "of the module or a callback: self.trainer.datamodule.train_set.epoch = self.current_epoch. "
    "The size must stay."
)


class _UnknownYet(ConfigError, AttributeError):
    """An AttributeError, so that `hasattr` is false."""


class OneProcess:
    """Stands in for the Trainer while a data module builds its data: the ranks of a run are not its
    business.
    """

    world_size = num_nodes = num_devices = 1
    global_rank = local_rank = node_rank = 0
    is_global_zero = True

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if self._trainer is None:
            raise _UnknownYet(
                f"self.trainer.{name}: a data module is set up, and its training loader made, "
                "once, before the Trainer "
                "is made. Until then only world_size, global_rank and their like are known. "
                f"{_BY_EPOCH}"
            )
        return getattr(self._trainer, name)
