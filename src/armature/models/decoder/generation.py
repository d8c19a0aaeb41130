"""Generates text from a decoder, token by token, with a key-value cache."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armature.models.decoder.cache import KeyValueCache

log = logging.getLogger(__name__)
# tokens per look at whether all rows have ended, for which the host waits for the device
READ_EVERY, OTHER_READ_EVERY = {"cpu": 1}, 8


def complete(
    model: nn.Module, prompts: Sequence[Sequence[int]], *, max_new_tokens: int,
    eot: int | Sequence[int] | None = None, device: torch.device | None = None, **options: Any,
) -> list[list[int]]:  # fmt: skip
    """Return each prompt of token ids with up to `max_new_tokens` more, its first new `eot` (or one
    of them) its last.

    Prompts of different lengths are continued together, each as it would be alone up to the model's
    context: all are read at once up to the end of the shortest one, which is continued while the
    longer ones are still read. Options are those of `generate`. Raises ValueError for an empty
    prompt.

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
    rows = [[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in prompts]
    ids = generate(
        model, torch.tensor(rows, device=device), max_new_tokens=max_new_tokens, eot=eot,
        lengths_B=torch.tensor(lengths, device=device), **options,
    ).tolist()  # fmt: skip
    texts, ends = [], _ends(eot)
    for length, row in zip(lengths, ids, strict=True):
        last = next((i for i in range(length, len(row)) if row[i] in ends), len(row))
        texts.append(row[: min(last + 1, length + max_new_tokens)])
    return texts


def _ends(eot: int | Sequence[int] | None) -> list[int]:
    return [] if eot is None else [eot] if isinstance(eot, int) else list(eot)


@torch.inference_mode()
# compiled blocks would be recompiled for each length of the cache
@torch.compiler.set_stance("force_eager")
def generate(
    model: nn.Module,
    prompt_BT: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eot: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    lengths_B: Tensor | None = None,
) -> Tensor:
    """Return the prompt (B, T) of token ids and up to `max_new_tokens` more.

    End early once every row has met `eot`, one token or several.

    Temperature 0 takes the likeliest token. If the model's context is full, the newest half of it
    is read again and generation continues. Of a row, only the first `lengths_B` ids are its prompt,
    if given: what follows is replaced. Options outside their range are for the caller to refuse.
    """
    context, (batch, length) = int(model.context), prompt_BT.shape  # pyright: ignore[reportArgumentType]
    end, device = length + max_new_tokens, prompt_BT.device
    if lengths_B is None:
        lengths_B = torch.full((batch,), length, device=device)
    ids_BT = F.pad(prompt_BT, (0, max_new_tokens))
    cache: Any = getattr(model, "make_cache", KeyValueCache)(positions=min(context, end))
    cache.newest_only = True
    last_B = torch.full_like(lengths_B, end - 1)  # the place of each row's first `eot`
    end_ids = torch.tensor(_ends(eot), dtype=ids_BT.dtype, device=device)
    read_every = READ_EVERY.get(device.type, OTHER_READ_EVERY)
    position = int(lengths_B.min())
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
            new_B = torch.where(position < lengths_B, ids_BT[:, position], new_B)
            if len(end_ids):
                new_B = torch.where(last_B < position, end_ids[0], new_B)
                ends_B = torch.isin(new_B, end_ids) & (position >= lengths_B) & (position < last_B)
                last_B = torch.where(ends_B, position, last_B)
            ids_BT[:, position] = new_B
            begin, position = position, position + 1
            if len(end_ids) and position % read_every == 0 and int(last_B.max()) < position:
                break
    return ids_BT[:, : min(position, int(last_B.max()) + 1) if len(end_ids) else position]


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
