"""A decoder in which the gradient of the embedding is infinite for batches with a certain first
token.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from armature.models.decoder.model import Decoder

FIRST_TOKEN = 74  # of one sample in every second step of the stream of tests/support/parity


class Overflowing(Decoder):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        assert self.embed is not None
        self.embed.register_forward_hook(self._explode)

    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.embed is not None:
            self.embed.explodes = bool((inputs[:, 0] == FIRST_TOKEN).any())  # pyright: ignore[reportAttributeAccessIssue]
        return super().forward(inputs, *args, **kwargs)

    @staticmethod
    def _explode(embed: nn.Module, args: Any, output: Tensor) -> None:
        if embed.explodes and torch.is_grad_enabled():
            output.register_hook(lambda gradient: gradient * math.inf)
