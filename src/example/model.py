"""A residual MLP that classifies points: a small model that trains under every strategy.

Shapes: B batch, F features, D width, N classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armature.models.loss import IGNORED


class Block(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + self.down(F.gelu(self.up(self.norm(x_BD))))


class ResidualMLP(nn.Module):
    """Repeated blocks in a ModuleDict, between a first and a last part.

    A pipeline stage sets the parts that it does not hold to None, so parameter names are the same
    under every strategy.
    """

    def __init__(self, *, features: int, classes: int, width: int, layers: int) -> None:
        super().__init__()
        self.width = width  # only `optimizer.base_width` reads it
        self.embed: nn.Linear | None = nn.Linear(features, width)
        self.blocks = nn.ModuleDict({str(i): Block(width) for i in range(layers)})
        self.head: nn.Linear | None = nn.Linear(width, classes)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits (B, N) of points (B, F), or their loss if targets (B,) are given."""
        x_BD = inputs if self.embed is None else self.embed(inputs)
        for block in self.blocks.values():
            x_BD = block(x_BD)
        outputs = x_BD if self.head is None else self.head(x_BD)
        return outputs if targets is None else self.loss(outputs, targets)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats, over the targets that count; 0 if there are
        none.
        """
        total = F.cross_entropy(outputs.float(), targets, ignore_index=IGNORED, reduction="sum")
        return total / (targets != IGNORED).sum().clamp(min=1)

    def initialize_parameter(self, name: str, param: Tensor, generator: torch.Generator) -> None:
        """Fill one full parameter, as a function of its name, its shape and the generator alone.

        With this method the model is built without memory, and each rank fills only the part that
        it holds. Without it every rank builds the whole model first.
        """
        if name.endswith("bias"):
            param.zero_()
        elif param.ndim == 1:  # the weight of a LayerNorm
            param.fill_(1.0)
        else:
            param.normal_(0.0, param.shape[1] ** -0.5, generator=generator)
