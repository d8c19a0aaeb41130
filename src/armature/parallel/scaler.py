"""fp16's loss scaler under any layout: all ranks agree whether a gradient overflowed, and skip the
step together.
"""

from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from armature.parallel import process_group
from armature.parallel.gradients import local_gradients, multiply, overflow

LARGEST = 2.0**127  # scale in fp32: gradients that never overflow let it grow


def precision_arguments(precision: str, *, mesh: bool) -> dict[str, Any]:
    """Return Lightning's arguments for a precision.

    It refuses fp16 under a mesh by name, but not as a plugin.
    """
    if mesh and precision == "16-mixed":
        return {"plugins": [MixedPrecision("16-mixed", "cuda")]}
    return {"precision": precision}


class SharedScaler(torch.amp.GradScaler):
    """torch's scaler for gradients that are sharded over any mesh, fused optimizers included.

    Each rank looks for infinities in the parts that it holds, and one all-reduce tells all others.

    Attributes:
        skipped: whether the newest step was left out because of an overflow; the same on every
            rank.
    """

    skipped: bool = False

    def __init__(self, *, device: str) -> None:
        super().__init__(device=device)
        self.device = torch.device(device)
        self._made = 0  # steps since the scale has changed
        # by optimizer: how many ranks have found an infinity or NaN in its unscaled gradients
        self._unscaled: dict[Optimizer, Tensor] = {}

    @property
    def _factor(self) -> Tensor:
        """The scale, 0-dim on the device: `get_scale` would wait for it."""
        return self.scale(torch.ones((), device=self.device))

    @override
    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale an optimizer's gradients, once before its step: clipping them in manual
        optimization did.
        """
        if optimizer in self._unscaled:
            return
        parts = local_gradients(
            param for group in optimizer.param_groups for param in group["params"]
        )
        if any(part.dtype == torch.float16 for part, _ in parts):
            raise ValueError(
                "A loss scaler needs weights in fp32: their fp16 gradients cannot be unscaled."
            )
        multiply(parts, by=1 / self._factor)
        self._unscaled[optimizer] = process_group.all_sum(overflow(parts, device=self.device))

    def forget_unscaled(self) -> None:
        """Forget which gradients are unscaled: if no step was made of them, the next ones are
        scaled.
        """
        self._unscaled.clear()

    @override
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step unless a rank has found an infinity or NaN.

        Reading that is the step's only host synchronization.
        """
        self.unscale_(optimizer)
        self.skipped = bool(self._unscaled.pop(optimizer))
        return None if self.skipped else optimizer.step(*args, **kwargs)

    @override
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Change the scale after an optimizer's step."""
        self._made += 1
        if self.skipped:
            new_scale = self._factor * self.get_backoff_factor()
        elif self._made == self.get_growth_interval():
            new_scale = (self._factor * self.get_growth_factor()).clamp(max=LARGEST)
        if new_scale is not None:
            self._made = 0
            super().update(new_scale)

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"_growth_tracker": self._made}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._made = state_dict["_growth_tracker"]
