"""Which parameters have no gradient in exact arithmetic: Adam makes full steps of their rounding noise."""

import json
from pathlib import Path

from lightning.pytorch import Callback

FILE = "without_gradient.json"


class WithoutGradient(Callback):
    """In a run in float64, write the names of parameters whose gradient is never more than rounding noise."""

    def __init__(self) -> None:
        self.largest: dict[str, float] = {}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for name, param in pl_module.named_parameters():
            if param.grad is not None:
                self.largest[name] = max(self.largest.get(name, 0.0), float(param.grad.abs().max()))

    def on_train_end(self, trainer, pl_module):
        most = max(self.largest.values(), default=0.0)
        names = [name for name, value in self.largest.items() if value < 1e-11 * most]
        (Path(trainer.default_root_dir) / FILE).write_text(json.dumps(names))
