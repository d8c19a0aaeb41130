"""How evenly a mixture's experts are used: columns of metrics.csv, and each expert's load in
summary.json.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from armature.training.timings import Window


class ExpertLoad:
    """A monitor of the step log: the largest and smallest load of any expert, in multiples of its
    block's mean.

    `experts/load_max` is 1 if all experts are used alike; `experts/load_min` is 0 if one is not
    used at all.
    """

    def __init__(self, mixtures: list[Any]) -> None:
        self.mixtures = mixtures

    @classmethod
    def of(cls, module: nn.Module) -> ExpertLoad | None:
        """Return the monitor of the module's mixtures, or None if it has none."""
        mixtures = [model for model in module.modules() if hasattr(model, "load_LE")]
        return cls(mixtures) if mixtures else None

    def batch_ended(self, trainer: Trainer, *, stepped: bool) -> dict[str, Tensor]:
        loads = [model.load_LE.float() for model in self.mixtures if model.load_LE is not None]
        if not stepped or not loads:
            return {}
        # dense blocks have no tokens; two mixtures may have different numbers of experts
        lowest = [
            load_LE.where(load_LE.sum(1, keepdim=True) > 0, torch.inf).min() for load_LE in loads
        ]
        highest = torch.stack([load_LE.max() for load_LE in loads]).max()
        return {"experts/load_max": highest, "experts/load_min": torch.stack(lowest).min()}

    def measured(self, trainer: Trainer, window: Window) -> dict[str, float]:
        return {}

    def by_expert(self) -> dict[str, list[float]]:
        """Return the newest load of each expert by the number of its block."""
        return {
            str(index): [round(load, 4) for load in load_E]
            for model in self.mixtures if model.load_LE is not None
            for index, load_E in enumerate(model.load_LE.tolist()) if any(load_E)
        }  # fmt: skip
