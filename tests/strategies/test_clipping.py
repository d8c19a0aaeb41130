"""Clipping by hand, as Lightning's precision plugins do it."""

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

from tests.trainers import quiet_trainer


class Clipping(L.LightningModule):
    def __init__(self, *, value: float, algorithm: str) -> None:
        super().__init__()
        self.automatic_optimization, self.value, self.algorithm = False, value, algorithm
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward((self.weight * torch.tensor([3.0, 4.0])).sum())
        self.clip_gradients(
            optimizer, gradient_clip_val=self.value, gradient_clip_algorithm=self.algorithm
        )
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.weight], lr=1.0)


@pytest.mark.filterwarnings("ignore:.*many workers.*")
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("value", [-1.0, 0.0, 2.5])
def test_only_a_positive_value_clips(value, algorithm):
    module = Clipping(value=value, algorithm=algorithm)
    trainer = quiet_trainer(max_steps=1)  # fmt: skip
    trainer.fit(module, DataLoader(torch.ones(1)))  # pyright: ignore[reportArgumentType]
    clipped = {"norm": [-1.5, -2.0], "value": [-2.5, -2.5]}[algorithm]
    assert module.weight.tolist() == pytest.approx(clipped if value > 0 else [-3.0, -4.0])
