"""fp16's loss scaler under any layout: all ranks agree whether a gradient overflowed, and skip the
step together.
"""

# pyright: reportPrivateImportUsage=false

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from typing_extensions import override

from armature.parallel.gradients import local_gradients


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

    @override
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        parts: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        with torch.no_grad():
            for part, _ in local_gradients(
                param for group in optimizer.param_groups for param in group["params"]
            ):
                parts.setdefault((part.device, part.dtype), []).append(part)
            for (device, dtype), grads in parts.items():
                if dtype == torch.float16 and not allow_fp16:
                    raise ValueError(
                        "A loss scaler needs weights in fp32: their fp16 gradients cannot be "
                        "unscaled."
                    )
                found = torch.zeros_like(found_inf, device=device)
                torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inv_scale.to(device))
                found_inf = torch.maximum(found_inf, found.to(found_inf.device))
            if dist.is_initialized():
                dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}

    @override
    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale an optimizer's gradients, once before its step: clipping them in manual
        optimization did.
        """
        if self._per_optimizer_states[id(optimizer)]["stage"] is not OptState.UNSCALED:
            super().unscale_(optimizer)

    @override
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Change the scale after an optimizer's step.

        Gradients of others may be unscaled already, and stay so.
        """
        unscaled = self.forget_unscaled()
        super().update(new_scale)
        self._per_optimizer_states.update(unscaled)

    def forget_unscaled(self) -> dict[int, dict[str, Any]]:
        """Forget, and return, which gradients are unscaled: if no step was made of them, the next
        ones are scaled.
        """
        states = self._per_optimizer_states
        return {
            key: states.pop(key)
            for key, state in [*states.items()]
            if state["stage"] is OptState.UNSCALED
        }

    @override
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step unless a rank has found an infinity or NaN.

        Reading that is the step's only host synchronization.
        """
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        self.skipped = any(found.item() for found in state["found_inf_per_device"].values())
        state["stage"] = OptState.STEPPED
        return None if self.skipped else optimizer.step(*args, **kwargs)
