"""Generates text from a decoder, token by token, with a key-value cache."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from armature.models.decoder.cache import KeyValueCache

log = logging.getLogger(__name__)
# tokens per look at whether all rows have ended, for which the host waits for the device
READ_EVERY, OTHER_READ_EVERY = {"cpu": 1}, 8


@torch.inference_mode()
# compiled blocks would be recompiled for each length of the cache
@torch.compiler.set_stance("force_eager")
def complete(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eot: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
) -> list[list[int]]:
    """Return each prompt of token ids with up to `max_new_tokens` more, its first new `eot` (or one
    of them) its last.

    Prompts of different lengths are continued together, each as it would be alone up to the model's
    context: all are read at once up to the end of the shortest one, which is continued while the
    longer ones are still read. If the context is full, the newest half of it is read again and
    generation continues. Temperature 0 takes the likeliest token. Options outside their range are
    for the caller to refuse. Raises ValueError for an empty prompt.

    Args:
        device: where the model computes, if its weights lie elsewhere until they are used.
    """
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) == 0:
        raise ValueError(
            f"each prompt must have at least one token. Got prompts of {lengths} tokens"
        )
    if max(lengths) > (context := int(model.context)):  # pyright: ignore[reportArgumentType]
        log.warning(
            "A prompt has %d tokens, and the model reads the last %d: type a longer data.context.",
            max(lengths), context,
        )  # fmt: skip
    device = device or next(model.parameters()).device
    position, end = min(lengths), max(lengths) + max_new_tokens
    ends = [] if eot is None else [eot] if isinstance(eot, int) else list(eot)
    rows = [[*prompt, *[0] * (end - len(prompt))] for prompt in prompts]
    ids_BT, lengths_B, ends_E = (
        torch.tensor(each, dtype=torch.int64, device=device) for each in (rows, lengths, ends)
    )
    ended_B = torch.zeros_like(lengths_B, dtype=torch.bool)
    cache: Any = getattr(model, "make_cache", KeyValueCache)(positions=min(context, end))
    cache.newest_only = True
    read_every = READ_EVERY.get(device.type, OTHER_READ_EVERY)
    begin = max(0, position - context)
    with _in_eval(model):
        while position < end:
            if cache.length + position - begin > context:
                cache.clear()
                begin = position - max(1, context // 2)
            logits_BV = model(ids_BT[:, begin:position], cache=cache)[:, -1]
            new_B = sample(
                logits_BV, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator
            )[:, 0]
            is_new_B = position >= lengths_B
            ids_BT[:, position] = new_B.where(is_new_B, ids_BT[:, position])
            begin, position = position, position + 1
            if ends:
                ended_B |= torch.isin(new_B, ends_E) & is_new_B
                if position % read_every == 0 and ended_B.all():
                    break
    texts = []
    for length, row in zip(lengths, ids_BT[:, :position].tolist(), strict=True):
        last = next((i for i in range(length, len(row)) if row[i] in ends), len(row))
        texts.append(row[: min(last + 1, length + max_new_tokens)])
    return texts


@contextmanager
def _in_eval(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def sample(
    logits_BV: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return one token id per row (B, 1), from the `top_k` likeliest and the fewest that together
    reach `top_p`.
    """
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
