"""A small vision transformer (arXiv:2010.11929) with pre-norm blocks and mean pooling
(arXiv:2205.01580).

Shapes: B batch, C channels, I image side, P patches, E pixels of a patch, D width, H heads, K head
width, N classes.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armature.models.autocast import to_compute_dtype
from armature.models.loss import mean_cross_entropy
from armature.models.plan import by_rows
from armature.models.vit.check import problems


class PatchEmbedding(nn.Module):
    """Cuts an image into square patches, projects each, and adds a learned position."""

    def __init__(self, width: int, *, image_size: int, patch_size: int, channels: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.patch = nn.Linear(channels * patch_size**2, width)
        self.position = nn.Parameter(torch.zeros((image_size // patch_size) ** 2, width))

    def forward(self, images_BCII: Tensor) -> Tensor:
        patches_BPE = F.unfold(images_BCII, self.patch_size, stride=self.patch_size).transpose(1, 2)
        return self.patch(patches_BPE) + self.position


class Attention(nn.Module):
    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x_BPD: Tensor) -> Tensor:
        # -1: under tensor parallelism a rank holds only some of the heads
        q_BHPK, k_BHPK, v_BHPK = (
            project(x_BPD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        a_BHPK = F.scaled_dot_product_attention(q_BHPK, k_BHPK, v_BHPK)
        return self.o(a_BHPK.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int, *, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x_BPD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BPD)))


class Block(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, width: int, *, heads: int, ffn_hidden: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, heads=heads)
        self.ffn_norm, self.ffn = nn.LayerNorm(width), FeedForward(width, hidden=ffn_hidden)

    def forward(self, x_BPD: Tensor) -> Tensor:
        attended_BPD = self.attention(to_compute_dtype(self.attention_norm(x_BPD)))
        x_BPD = x_BPD + F.dropout(attended_BPD, self.dropout, self.training)
        return x_BPD + F.dropout(
            self.ffn(to_compute_dtype(self.ffn_norm(x_BPD))), self.dropout, self.training
        )


class VisionTransformer(nn.Module):
    """Patch embedding, blocks, norm and head; a pipeline stage sets the parts that it does not hold
    to None.

    `ffn_hidden` defaults to four times the width. Raises ValueError with every impossible size.
    """

    modality = "images"

    def __init__(
        self,
        *,
        image_size: int,
        patch_size: int,
        channels: int,
        classes: int,
        width: int,
        layers: int,
        heads: int,
        ffn_hidden: int | None = None,
        dropout: float = 0.0,
        label_smoothing: float = 0.0,
    ) -> None:
        if found := problems({k: v for k, v in locals().items() if k not in ("self", "__class__")}):
            raise ValueError("; ".join(found))
        super().__init__()
        self.width, self.layers, self.label_smoothing = width, layers, label_smoothing
        self.embed: PatchEmbedding | None = PatchEmbedding(
            width, image_size=image_size, patch_size=patch_size, channels=channels
        )
        block = partial(
            Block, width, heads=heads, ffn_hidden=ffn_hidden or 4 * width, dropout=dropout
        )
        self.blocks = nn.ModuleDict({str(i): block() for i in range(layers)})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(width)
        self.head: nn.Linear | None = nn.Linear(width, classes)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits (B, N) of images (B, C, I, I), or their loss if targets (B,) are given.

        A pipeline stage without an embedding takes (B, P, D); one without a head returns (B, P, D).
        """
        x_BPD = self.embed(inputs) if self.embed is not None else inputs
        for block in self.blocks.values():
            x_BPD = block(x_BPD)
        if self.norm is not None:
            x_BPD = self.norm(x_BPD)
        outputs = self.head(x_BPD.mean(dim=1)) if self.head is not None else x_BPD
        return outputs if targets is None else self.loss(outputs, targets)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of logits (B, N), in nats, over the targets (B,) that are
        not -100.

        Labels are smoothed in training only.
        """
        return mean_cross_entropy(
            outputs, targets, label_smoothing=self.label_smoothing if self.training else 0.0
        )

    @by_rows
    def initialize_parameter(self, name: str, param: Tensor, generator: torch.Generator) -> None:
        """Fill rows of one parameter, as a function of its name, its row's size and the generator
        alone.

        Norms are 1, biases 0. Matrices are normal with deviation 1 / sqrt(inputs) (LeCun et al.
        1998, 4.6); those that write to the residual stream get 1 / sqrt(2 * layers) of it (GPT-2,
        Radford et al. 2019, 2.3). Positions have 0.3, about the scale of the projected patches of
        pixels from 0 to 1; with less they are learned late.
        """
        if name.endswith("bias"):
            param.zero_()
        elif param.ndim == 1:
            param.fill_(1.0)
        elif name.endswith("position"):
            param.normal_(0.0, 0.3, generator=generator)
        else:
            residual = name.endswith(("attention.o.weight", "ffn.down.weight"))
            deviation = param.shape[1] ** -0.5 / (math.sqrt(2 * self.layers) if residual else 1.0)
            param.normal_(0.0, deviation, generator=generator)
