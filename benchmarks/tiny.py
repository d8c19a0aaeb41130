"""A model whose step takes a fraction of a millisecond, to show the overhead of a training loop per
step.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

FEATURES, CLASSES = 16, 4
SIZE = 50_000_000  # samples per epoch, so that none ends during a measurement


class TinyClassifier(nn.Module):
    """One layer; `forward(inputs, targets)` returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        outputs = self.layer(inputs)
        return outputs if targets is None else F.cross_entropy(outputs, targets)


def rows() -> tuple[Tensor, Tensor]:
    """Return random inputs and targets that depend on them."""
    inputs = torch.randn(4096, FEATURES, generator=torch.Generator().manual_seed(0))
    return inputs, inputs[:, :CLASSES].argmax(dim=1)


class TinyRows(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.rows = rows()

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[0] for name, values in self.batch([index]).items()}

    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        places = torch.tensor(indices) % len(self.rows[0])
        return {"inputs": self.rows[0][places], "targets": self.rows[1][places]}
