"""A model that the core has never seen and that has no plan."""

import torch.nn.functional as F
from torch import Tensor, nn


class ConvNet(nn.Module):
    """Built on a real device under the seeded generator: it cannot initialize itself by name."""

    def __init__(self, *, image_size: int, channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        x = F.relu(self.norm(self.first(inputs)))
        outputs = self.head(F.relu(self.second(x)).mean((2, 3)))
        return outputs if targets is None else self.loss(outputs, targets)

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)
