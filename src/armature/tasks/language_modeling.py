"""Next-token prediction."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from armature.models.decoder.generation import complete
from armature.tasks.base import Task


class LanguageModeling(Task):
    """Logs the loss in nats per token, perplexity, and bits per byte if the data module has
    `bytes_per_token`.

    Bits per byte, unlike the other two, can be compared across tokenizers and with file
    compressors. The training loss is the model's: `Decoder.loss`, or its twin without all the
    logits, `ChunkedCrossEntropy`.
    """

    modality = "tokens"
    metric_names = ("loss", "perplexity", "bits_per_byte")

    def __init__(
        self,
        model: Callable[[], nn.Module],
        *,
        preview_prompt: str | Sequence[str] = "auto",
        preview_tokens: int = 48,
        preview_temperature: float = 0.6,
        **task: Any,
    ) -> None:
        super().__init__(model, **task)
        self.preview_prompt, self.preview_tokens = preview_prompt, preview_tokens
        self.preview_temperature = preview_temperature

    @override
    def final_metrics(self, values: dict[str, float], split: str) -> dict[str, float]:
        loss = values["loss"]
        metrics = {**values, "perplexity": math.inf if loss > 700.0 else math.exp(loss)}
        bytes_per_token = getattr(
            getattr(self.trainer, "datamodule", None), "bytes_per_token", None
        )
        if bytes_per_token is not None:
            metrics["bits_per_byte"] = loss / math.log(2) / bytes_per_token(split)
        return metrics

    @override
    def preview(self) -> str | None:
        """Return short texts that continue prompts, the same for the same weights; None without a
        tokenizer.

        The prompts are `preview_prompt`, or beginnings of lines that the data hold out. They stand
        between ‹ and ›.
        """
        data: Any = getattr(self.trainer, "datamodule", None)
        tokenizer = getattr(data, "tokenizer", None)
        if tokenizer is None or self.model is None or self.preview_tokens == 0:
            return None
        prompts = (
            self.preview_prompt
            if self.preview_prompt != "auto"
            else getattr(data, "prompts", list)()
        )
        texts = [prompts] if isinstance(prompts, str) else [*prompts]
        prompts = [ids for text in texts if (ids := tokenizer.encode(text).ids)]
        if not prompts:
            return None
        strategy: Any = self.trainer.strategy
        own = next(self.model.parameters()).device
        device = strategy.root_device if getattr(strategy, "fetches_weights", False) else own
        continued = complete(
            self.model,
            prompts,
            max_new_tokens=self.preview_tokens,
            temperature=self.preview_temperature,
            generator=torch.Generator(device).manual_seed(0),
            device=device,
        )
        samples = []
        for prompt, ids in zip(prompts, continued, strict=True):
            start, whole = tokenizer.decode(prompt), tokenizer.decode(ids)
            samples.append(f"‹{start}›{whole.removeprefix(start).rstrip()}")
        return "\n".join(["samples, each after the prompt in ‹›:", *samples])
