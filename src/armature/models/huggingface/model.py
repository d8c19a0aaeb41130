"""Models that transformers builds and computes, from the config.json of a Hugging Face folder. Never remote code.

The weights are not read here: a strategy does so, as for `armature.models.decoder.model.Decoder`.

Shapes: B batch, T positions, V vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from typing_extensions import override

from armature.models.huggingface import names, sharding
from armature.models.huggingface.check import problems
from armature.models.loss import mean_cross_entropy
from armature.models.plan import Plan


class Cache:
    """What generation keeps of the positions so far, in the form of transformers."""

    def __init__(self, config: Any, *, positions: int | None = None) -> None:
        self.positions, self.length, self._config = positions, 0, config
        self.clear()

    def clear(self) -> None:
        """Forget all positions."""
        self.length, self.values = 0, _transformers().DynamicCache(config=self._config)


class PretrainedModel(nn.Module):
    """A model of transformers, without its weights.

    Args:
        pretrained: the folder whose config.json describes the model, and from which its weights are read.
        context: tokens of a row.
        attention: transformers' name of the attention kernel; None: its choice for this model.

    Raises:
        ValueError: this version of transformers has no such model.
    """

    modality = "tokens"
    unsupported_strategies: ClassVar[dict[str, str]] = {  # read from the source before launch
        "pipeline": "transformers' forward needs all of the model's parts. Type strategy=fsdp"
    }
    auto_class: ClassVar[str]  # of transformers; `mapping` names the configurations that it knows
    mapping: ClassVar[str]
    parts: ClassVar[str]  # what a model of this class ends in, for messages

    def __init__(self, *, pretrained: str, context: int, attention: str | None, **settings: Any) -> None:
        if found := problems({"context": context, "attention": attention, **settings}):
            raise ValueError("; ".join(found))
        super().__init__()
        self.pretrained, self.context = pretrained, context
        self.inner: Any = self._build(attention, settings)
        text = self.inner.config.get_text_config()
        self.width: int | None = getattr(text, "hidden_size", None)
        self.heads: int | None = getattr(text, "num_attention_heads", None)
        self.kv_heads: int | None = getattr(text, "num_key_value_heads", None)

    def _build(self, attention: str | None, settings: dict[str, Any]) -> nn.Module:
        transformers = _transformers()
        known = getattr(transformers, self.mapping)
        content, _ = transformers.PreTrainedConfig.get_config_dict(self.pretrained, local_files_only=True)
        kind = content.get("model_type")
        if kind not in transformers.CONFIG_MAPPING:
            raise ValueError(
                f"model.pretrained={self.pretrained}: transformers {transformers.__version__} has no "
                f"model_type={kind}. Install a newer version: code in a folder is never run"
            )
        config = transformers.AutoConfig.from_pretrained(
            self.pretrained, local_files_only=True, trust_remote_code=False
        )
        if type(config) not in known:
            raise ValueError(
                f"model.pretrained={self.pretrained}: transformers has no {self.parts} of model_type={kind}"
            )
        for key, value in settings.items():
            setattr(config, key, value)
        options = {} if attention is None else {"attn_implementation": attention}
        with _weights_on(torch.get_default_device()):
            built = getattr(transformers, self.auto_class)
            return built.from_config(config, dtype=torch.get_default_dtype(), trust_remote_code=False, **options)

    @override
    def _apply(self, fn: Any, recurse: bool = True) -> PretrainedModel:
        """Keep the type of computed tables, as of rotary frequencies, which 16 bits would round."""
        kept = [
            (module, name, buffer)
            for module in self.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name in module._non_persistent_buffers_set and buffer.is_floating_point()
        ]
        super()._apply(fn, recurse)
        for module, name, before in kept:
            now = module.get_buffer(name)
            if now.dtype != before.dtype:
                setattr(module, name, before.to(now.device))
        return self

    @cached_property
    def plan(self) -> Plan | None:
        """How this model may be sharded; None: as one unit."""
        return sharding.plan_of(self.inner, prefix="inner")

    def names_in(self, saved: Collection[str]) -> dict[str, str]:
        """Return the folder's name of each parameter and buffer that it holds, given the names of its tensors.

        Raises ValueError if the folder lacks one, other than the parts that `may_be_new`.
        """
        found = names.match(self.inner, saved)
        if lacking := [name for name in found.missing if not self.may_be_new(name)]:
            raise ValueError(f"{self.pretrained}: its files lack {lacking[0]}, and {len(lacking) - 1} more")
        return {f"inner.{own}": theirs for own, theirs in found.found.items()}

    def saved_name(self, name: str) -> str:
        """Return the name under which transformers saves a parameter or buffer."""
        return names.original(self.inner, name.removeprefix("inner."))

    def may_be_new(self, name: str) -> bool:
        """Return whether a folder may lack a parameter (by its name in `inner`), which then begins at random."""
        return False

    def may_be_left(self, name: str) -> bool:
        """Return whether a tensor of the folder, by its name there, may be without a use."""
        return False

    def initialize_parameter(self, name: str, param: Tensor, generator: torch.Generator) -> None:
        """Fill a parameter that the folder lacks."""
        if param.ndim == 1:
            param.fill_(1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0)
        else:
            deviation = getattr(self.inner.config.get_text_config(), "initializer_range", None) or 0.02
            param.normal_(0.0, deviation, generator=generator)


class CausalLM(PretrainedModel):
    """A causal language model, of any architecture of transformers: AutoModelForCausalLM.

    Args:
        vocab_size: rows for tokens; the check before launch takes it from the folder.
    """

    auto_class, mapping = "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"
    parts = "causal language model"

    def __init__(
        self, *, pretrained: str, context: int, attention: str | None = None, vocab_size: int | None = None
    ) -> None:  # fmt: skip
        super().__init__(pretrained=pretrained, context=context, attention=attention)

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, cache: Cache | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Return logits (B, T, V) of token ids (B, T), or their loss if targets (B, T) are given.

        `documents` (B, T) numbers the documents that a row packs, in order: attention stays within each.
        """
        if cache is not None:
            outputs = self.inner(input_ids=inputs, past_key_values=cache.values, use_cache=True)
            cache.length += inputs.shape[1]
        else:
            places = {} if documents is None else {"position_ids": positions_within(documents)}
            outputs = self.inner(input_ids=inputs, use_cache=False, **places)
        return outputs.logits if targets is None else self.loss(outputs.logits, targets)

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of logits (B, T, V), in nats, over the targets (B, T) that are not -100."""
        return mean_cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def make_cache(self, *, positions: int | None = None) -> Cache:
        return Cache(self.inner.config, positions=positions)


def positions_within(documents_BT: Tensor) -> Tensor:
    """Return each position's place in its document. transformers keeps attention within them if these begin anew."""
    place_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = documents_BT.diff(prepend=documents_BT[:, :1] - 1) != 0
    return place_T - (begins_BT * place_T).cummax(dim=1).values


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError(f"transformers is not installed ({error}). Type make setup EXTRAS=finetune") from error


@contextmanager
def _weights_on(device: torch.device) -> Iterator[None]:
    """Let modules that are built have their parameters on `device`, and their buffers, with values, on the CPU.

    transformers computes tables, such as rotary frequencies, in constructors and keeps them in buffers that no
    checkpoint holds: on the meta device they would be lost.
    """

    def move(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.device.type == device.type:
            return None
        return nn.Parameter(param.to(device), requires_grad=param.requires_grad)

    hook = register_module_parameter_registration_hook(move)  # pyright: ignore[reportArgumentType]
    try:
        with torch.device("cpu"):
            yield
    finally:
        hook.remove()
