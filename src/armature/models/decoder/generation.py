"""Generates text from a decoder, token by token, with a key-value cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from armature.models.decoder.model import KeyValueCache


@torch.inference_mode()
@torch.compiler.set_stance("force_eager")  # compiled blocks would be recompiled for each length of the cache
def generate(
    model: nn.Module, prompt_BT: Tensor, *, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None,
    top_p: float | None = None, eot: int | None = None, generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    """Return the prompt (B, T) of token ids and up to `max_new_tokens` more. End early once every row has met `eot`.

    Temperature 0 takes the likeliest token. If the model's context is full, the newest half of it is read again and
    generation continues. Raises ValueError for an empty prompt and for options outside their range.
    """
    if prompt_BT.ndim != 2 or prompt_BT.shape[1] == 0:
        raise ValueError(f"prompt must be (batch, tokens) with at least one token. Got {tuple(prompt_BT.shape)}")
    if temperature < 0 or (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
        raise ValueError(
            f"temperature must be at least 0, top_k at least 1 and top_p in (0, 1]. "
            f"Got temperature={temperature}, top_k={top_k}, top_p={top_p}"
        )
    training, context = model.training, int(model.context)  # pyright: ignore[reportArgumentType]
    model.eval()
    try:
        ids_BT, cache = prompt_BT, KeyValueCache()
        ended_B = torch.zeros(prompt_BT.shape[0], dtype=torch.bool, device=prompt_BT.device)
        new_BT = ids_BT[:, -context:]
        for _ in range(max_new_tokens):
            if cache.length + new_BT.shape[1] > context:
                cache, new_BT = KeyValueCache(), ids_BT[:, -max(1, context // 2) :]
            logits_BV = model(new_BT, cache=cache)[:, -1]
            new_BT = sample(logits_BV, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
            if eot is not None:
                new_BT = torch.where(ended_B[:, None], eot, new_BT)
                ended_B |= new_BT[:, 0] == eot
            ids_BT = torch.cat([ids_BT, new_BT], dim=1)
            if eot is not None and bool(ended_B.all()):
                break
        return ids_BT
    finally:
        model.train(training)


def sample(
    logits_BV: Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    """Return one token id per row (B, 1), from the `top_k` likeliest and the fewest that together reach `top_p`."""
    logits_BV = logits_BV.float()
    if temperature == 0:
        return logits_BV.argmax(dim=-1, keepdim=True)
    logits_BV = logits_BV / temperature
    if top_k is not None and top_k < logits_BV.shape[-1]:
        least_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, float("-inf"))
    if top_p is not None and top_p < 1.0:
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
        probability_BV = sorted_BV.softmax(dim=-1)
        before_BV = probability_BV.cumsum(dim=-1) - probability_BV
        sorted_BV = sorted_BV.masked_fill(before_BV >= top_p, float("-inf"))
        logits_BV = torch.empty_like(logits_BV).scatter_(-1, order_BV, sorted_BV)
    return torch.multinomial(logits_BV.softmax(dim=-1), 1, generator=generator)
