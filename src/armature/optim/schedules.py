"""Learning-rate schedules: a factor of the peak rate as a function of the optimizer step.

Lengths (`warmup`, `decay`) are optimizer steps if they are whole numbers, and a share of the run if
below 1.0. `final`
is the factor after the last step: the last step's own is one step before it.
"""

import logging
import math
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

log = logging.getLogger(__name__)


class Schedule(LambdaLR):
    """A LambdaLR whose state is the step alone: warm-up times another factor.

    The factor of the warm-up rises to 1 at step `warmup`. The first step's is above zero, so no
    step is wasted.

    The peak rates come from the configuration, and the factor from the step. So a run can resume
    under a layout with other parameter groups, or with another rate.
    """

    def __init__(
        self, optimizer: Optimizer, warmup: int, factor: Callable[[int], float] = lambda step: 1.0
    ) -> None:
        super().__init__(optimizer, lambda step: min(1.0, (step + 1) / (warmup + 1)) * factor(step))

    def get_lr(self) -> list[Any]:
        self._include_added_groups(self.last_epoch - 1)
        return super().get_lr()

    def _include_added_groups(self, step: int) -> None:
        """Let groups that a hook added to the optimizer (`unfreeze_and_add_param_group`) keep their
        share of the rate.

        Args:
            step: the step for which their rates were set.
        """
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:
            share = group["lr"] / (self.lr_lambdas[0](step) or 1.0)
            # a rate that is more than others' is its peak
            peak = share if share <= max(self.base_lrs) else group["lr"]
            self.base_lrs.append(group.setdefault("initial_lr", peak))
            self.lr_lambdas.append(self.lr_lambdas[0])

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "_step_count": self._step_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["_step_count"]
        self._include_added_groups(self.last_epoch)
        self._last_lr = [
            base * factor(self.last_epoch)
            for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        for group, base, lr in zip(
            self.optimizer.param_groups, self.base_lrs, self._last_lr, strict=True
        ):
            group["initial_lr"], group["lr"] = base, lr


def cosine(
    optimizer: Optimizer, total_steps: int, *, warmup: int | float = 0.02, final: float = 0.1
) -> Schedule:
    """Return warm-up, then half a cosine down to `final` (arXiv:1608.03983)."""
    start, _ = _lengths(total_steps, warmup)
    return Schedule(
        optimizer,
        start,
        lambda step: (
            final
            + (1 - final) * 0.5 * (1 + math.cos(math.pi * _progress(step, start, total_steps)))
        ),
    )


def linear(
    optimizer: Optimizer, total_steps: int, *, warmup: int | float = 0.02, final: float = 0.0
) -> Schedule:
    """Return warm-up, then a straight line down to `final` (to zero: arXiv:2502.15938)."""
    start, _ = _lengths(total_steps, warmup)
    return Schedule(
        optimizer, start, lambda step: 1 - (1 - final) * _progress(step, start, total_steps)
    )


def wsd(
    optimizer: Optimizer,
    total_steps: int,
    *,
    warmup: int | float = 0.02,
    decay: int | float = 0.4,
    final: float = 0.0,
) -> Schedule:
    """Return warm-up, a stable phase, and a linear decay at the end (MiniCPM, arXiv:2404.06395)."""
    start, end = _lengths(total_steps, warmup, decay)
    return Schedule(
        optimizer, start, lambda step: 1 - (1 - final) * _progress(step, end, total_steps)
    )


def constant(optimizer: Optimizer, total_steps: int, *, warmup: int | float = 0) -> Schedule:
    """Return warm-up, then the peak rate."""
    return Schedule(optimizer, _lengths(total_steps, warmup)[0])


def _lengths(total_steps: int, warmup: int | float, decay: int | float = 0) -> tuple[int, int]:
    """Return the steps at which the warm-up ends and the decay begins.

    A run for a look (debug=fast, scripts/prove.py) may be shorter than both.
    """
    start = _steps("scheduler.warmup", warmup, total_steps)
    end = total_steps - _steps("scheduler.decay", decay, total_steps)
    if end < start:
        log.warning(
            "scheduler.warmup=%s%s: longer than the run's %s steps, so the rate is cut short. Type "
            "shares of the run (below 1.0), or more steps.",
            warmup,
            f" and scheduler.decay={decay}" if decay else "",
            total_steps,
        )
    return start, max(start, end)


def _steps(key: str, value: int | float, total_steps: int) -> int:
    if isinstance(value, float) and 0.0 <= value < 1.0:
        return round(value * total_steps)
    if value < 0 or value != int(value):
        raise ValueError(
            f"{key}={value} must be a whole number of optimizer steps, or a share of the run below "
            "1.0"
        )
    return int(value)


def _progress(step: int, start: int, end: int) -> float:
    """Return the progress from `start` to `end`, from 0 to 1."""
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))
