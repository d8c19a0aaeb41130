"""A decoder whose feed-forwards are mixtures of experts; everything else is `models/decoder/`.

Qwen3-MoE (arXiv:2505.09388) is this model with softmax scores and no shared expert. DeepSeek-V3
(arXiv:2412.19437) routes like it with sigmoid scores, a shared expert and a first dense block; its
attention is another.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from armature.models.decoder.model import Block, Decoder
from armature.models.mixture.check import problems
from armature.models.mixture.experts import Mixture
from armature.models.plan import by_rows


class MixtureBlock(Block):
    """A decoder's block with `mixture` in place of `ffn`."""

    def __init__(self, width: int, *, mixture: dict[str, Any], **options: Any) -> None:
        options["ffn_hidden"] = 1
        super().__init__(width, **options)
        del self.ffn
        self.mixture = Mixture(width, **mixture)
        # a hook of the block, around its recomputation and its compiled code: both are inside of
        # forward
        self.register_forward_hook(_count_tokens)

    def feed_forward(self, x_BTD: Tensor) -> Tensor:
        return self.mixture(x_BTD)


def _count_tokens(block: Any, *_: Any) -> None:
    block.mixture.count_newest()


class MixtureDecoder(Decoder):
    """A `Decoder`, whose arguments are passed on, with `active` of `experts` in each block after
    `dense_layers`.

    `expert_hidden` is an expert's hidden width, `shared_hidden` that of an expert for all tokens
    (None: none), and `ffn_hidden` that of the dense blocks. `score` turns the router's logits into
    weights: softmax over all experts, or sigmoid. `normalized`: the weights of a token's experts
    add up to 1. `balance_rate` is the step of the bias that levels the experts' load; with 0 the
    bias stays 0. Raises ValueError with every impossible size.

    Attributes:
        load_LE: each expert's tokens in the newest optimizer step, over the mean of its block's
            experts (layers, experts); 0 in dense blocks. None before the first step.
    """

    def __init__(
        self,
        *,
        experts: int,
        active: int,
        expert_hidden: int,
        shared_hidden: int | None = None,
        dense_layers: int = 0,
        score: str = "sigmoid",
        normalized: bool = True,
        balance_rate: float = 1e-3,
        **sizes: Any,
    ) -> None:
        own = {k: v for k, v in locals().items() if k not in ("self", "__class__", "sizes")}
        if found := problems({**sizes, **own}):
            raise ValueError("; ".join(found))
        self._dense_layers, self._mixture = own.pop("dense_layers"), own
        super().__init__(**sizes)
        self.experts = experts
        self.load_LE: Tensor | None = None

    def make_block(self, index: int, **options: Any) -> Block:
        if index < self._dense_layers:
            return Block(self.width, **options)
        return MixtureBlock(self.width, mixture=self._mixture, **options)

    def mixtures(self) -> dict[int, Mixture]:
        """Return the mixtures that this process holds by their block's number."""
        return {
            int(name): b.mixture for name, b in self.blocks.items() if isinstance(b, MixtureBlock)
        }

    def take_load(self, *, device: torch.device) -> Tensor:
        """Return the tokens of each expert since the last call (layers, experts); 0 in blocks held
        elsewhere.
        """
        load_LE = torch.zeros(self.layers, self.experts, dtype=torch.int64, device=device)
        for index, mixture in self.mixtures().items():
            if (count_E := mixture.take_counts()) is not None:
                load_LE[index] = count_E
        return load_LE

    def rebalance(self, load_LE: Tensor) -> None:
        """Level the load of the next step, given that of the newest one on all ranks (layers,
        experts).
        """
        for index, mixture in self.mixtures().items():
            mixture.rebalance(load_LE[index])
        # which MPS does not have
        exact = torch.float32 if load_LE.device.type == "mps" else torch.float64
        self.load_LE = self.experts * load_LE.to(exact) / load_LE.sum(1, keepdim=True).clamp(min=1)

    @contextmanager
    def counted_passes(self, number: int) -> Iterator[None]:
        """Count the tokens of only the last so many training passes of each block inside the
        context.
        """
        mixtures = [*self.mixtures().values()]
        for mixture in mixtures:
            mixture.passes = []
        try:
            yield
        finally:
            for mixture in mixtures:
                passes, mixture.passes = mixture.passes or [], None
                for count_E in passes[max(0, len(passes) - number) :]:
                    mixture.count(count_E)

    def flops_per_sample(self, inputs: Tensor) -> float:
        """Return the decoder's count, in which a token's own experts are matrices like others."""
        used = self._mixture["active"] * self._mixture["expert_hidden"]
        active = 3 * used * self.width * len(self.mixtures())
        return super().flops_per_sample(inputs) + 6.0 * active * inputs[0].numel()

    @by_rows
    def initialize_parameter(self, name: str, param: Tensor, generator: torch.Generator) -> None:
        """Fill one parameter as a decoder does; the experts' last matrices write to the residual
        stream.
        """
        residual = name.endswith(("experts.down", "shared.down.weight"))
        super().initialize_parameter("ffn.down.weight" if residual else name, param, generator)
