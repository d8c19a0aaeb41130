"""Muon: orthogonalized momentum for hidden matrices, and AdamW for everything else, in one
optimizer.

Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), with the
step size of "Muon is Scalable for LLM Training" (arXiv:2502.16982), which makes the update as large
as AdamW's.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from armature.optim.groups import transferred_rates

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon(Optimizer):
    """Takes the groups of `parameter_groups`: orthogonalizes those with `hidden=True`, and applies
    AdamW to the others.

    `lr` is the rate of both: each hidden update is scaled to a root mean square of 0.2, about that
    of AdamW.
    `precision` is the run's: with "bf16-mixed" and "bf16-true" the iteration runs in bf16,
    otherwise in fp32, where a step is the same under every layout up to rounding.

    With `base_width`, `lr` is the rate of a model of that width, and hidden matrices of this model
    get sqrt(base_width / width) of it. An update's largest singular value is its root mean square
    times the square root of the width, so this keeps it constant (arXiv:2310.17813).

    Attributes:
        matrix_work: who orthogonalizes which matrix. A strategy of several ranks sets one that
            divides the work and gathers matrices that are sharded.
    """

    unsupported_strategies: ClassVar[dict[str, str]] = {  # read from the source before launch
        "deepspeed": "its engine flattens matrices, which Muon needs whole. Type optimizer=adamw"
    }

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float = 2e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        newton_schulz_steps: int = 5,
        precision: str = "32-true",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        base_width: int | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "newton_schulz_steps": newton_schulz_steps,
            "betas": tuple(betas),
            "eps": eps,
            "hidden": False,
        }
        params = transferred_rates(
            params, lr=lr, weight_decay=weight_decay, base_width=base_width, power=0.5
        )
        super().__init__(params, defaults)
        self.matrix_work: Any = LocalMatrices()
        self._dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float32

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make one update. Each parameter's state is made at its first gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            if group["hidden"]:
                for together in self.matrix_work.rounds(params):
                    self._orthogonal_step([params[i] for i in together], group)
            else:
                self._adamw_step(params, group)
        return loss

    def _orthogonal_step(self, params: list[Tensor], group: dict[str, Any]) -> None:
        updates = []
        for param in params:
            state, grad = self.state[param], param.grad
            assert grad is not None
            if not state:
                state["momentum_buffer"] = torch.zeros_like(param)
            momentum = state["momentum_buffer"]
            momentum.lerp_(grad, 1 - group["momentum"])
            updates.append(grad.lerp(momentum, group["momentum"]).to(self._dtype))
        updates = self.matrix_work.map(
            updates, partial(orthogonalize, steps=group["newton_schulz_steps"])
        )
        for param, update in zip(params, updates, strict=True):
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.add_(
                update.to(param.dtype), alpha=-group["lr"] * 0.2 * max(param.shape[-2:]) ** 0.5
            )

    def _adamw_step(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            state = self.state[param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
                state["exp_avg"], state["exp_avg_sq"] = (
                    torch.zeros_like(param),
                    torch.zeros_like(param),
                )
        states = [self.state[param] for param in params]
        adamw(
            params,
            [param.grad for param in params if param.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
        )


class LocalMatrices:
    """Orthogonalizes each matrix in this process, which holds the whole of it."""

    def rounds(self, matrices: Sequence[Tensor]) -> list[list[int]]:
        return [[i] for i in range(len(matrices))]

    def map(self, matrices: list[Tensor], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        if any(hasattr(matrix, "full_tensor") for matrix in matrices):
            raise TypeError(
                "Muon needs whole matrices, and this one is sharded over ranks. Our strategies "
                "handle that; in your own loop, set optimizer.matrix_work = "
                "armature.parallel.distributed_matrices.DistributedMatrices()."
            )
        return [function(matrix) for matrix in matrices]


def orthogonalize(matrix: Tensor, *, steps: int = 5) -> Tensor:
    """Push all singular values towards 1, to between about 0.7 and 1.2, by Newton-Schulz iteration.

    Of a matrix, or of each of a stack of matrices.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    product = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = product(x, product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
