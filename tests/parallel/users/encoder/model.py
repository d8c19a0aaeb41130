"""A user's own encoder: reads tokens both ways and labels each of them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.mix(x_BTD).mean(dim=1, keepdim=True)
        return x_BTD + self.down(F.gelu(self.up(self.norm(x_BTD))))


class Encoder(nn.Module):
    def __init__(self, *, vocab_size: int, context: int, width: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.stack = nn.ModuleDict({str(i): Layer(width) for i in range(depth)})
        self.out = nn.Linear(width, vocab_size)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(inputs) if self.tokens is not None else inputs
        for layer in self.stack.values():
            x = layer(x)
        outputs = self.out(x) if self.out is not None else x
        return outputs if targets is None else self.loss(outputs, targets)

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def initialize_parameter(self, name: str, param: Tensor, generator: torch.Generator) -> None:
        if param.ndim == 1:
            param.fill_(float("norm.weight" in name))
        else:
            param.normal_(0.0, 0.05, generator=generator)
