"""One process, one device."""

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from typing_extensions import override

from armature.strategies.base import StrategyMixin


class SingleDevice(StrategyMixin, SingleDeviceStrategy):
    """The strategy that all others are compared with."""

    saves_files = True

    def __init__(
        self, *, seed: int = 0, activation_checkpointing: str | float = "none",
        compile: str = "none", compile_mode: str = "default", float8: bool | str = False,
    ) -> None:  # fmt: skip
        super().__init__()
        # the Trainer sets it, from its accelerator
        self.parallel_devices: list[torch.device] | None = None
        self.configure_mixin(seed, activation_checkpointing, compile, compile_mode, float8)

    @property
    @override
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else torch.device("cpu")
