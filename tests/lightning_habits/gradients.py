"""Which elements of parameters have no gradient in exact arithmetic.

Adam makes full steps of their rounding noise.
"""

from pathlib import Path

import torch
from lightning.pytorch import Callback
from torch import Tensor

FILE = "without_gradient.pt"


class WithoutGradient(Callback):
    """In a run in float64, write which elements of parameters have gradients of rounding noise
    only.
    """

    def __init__(self) -> None:
        self.largest: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for name, param in pl_module.named_parameters():
            if param.grad is not None:
                known = self.largest.get(name, torch.zeros_like(param.grad))
                self.largest[name] = torch.maximum(known, param.grad.abs())

    def on_train_end(self, trainer, pl_module):
        most = max(
            (float(value.max()) for value in self.largest.values() if value.numel()), default=0.0
        )
        masks = {name: value < 1e-11 * most for name, value in self.largest.items()}
        torch.save(masks, Path(trainer.default_root_dir) / FILE)
