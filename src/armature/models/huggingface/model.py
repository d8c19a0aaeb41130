"""Models that transformers builds and computes, from the config.json of a Hugging Face folder.

Never remote code.

The weights are not read here: a strategy does so, as for `armature.models.decoder.model.Decoder`.

Shapes: B batch, T positions, V vocabulary.
"""

import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from armature.models.huggingface import sharding
from armature.models.loss import IGNORED, mean_cross_entropy
from armature.models.plan import Plan
from armature.models.wrapped import Match, WrappedModel, weights_on

# a kernel's package, and memory: not the folder's fault
NOT_DAMAGE = (ImportError, MemoryError, torch.OutOfMemoryError)


# kinds of layers, in transformers' words
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}

# whose blocks read some weights past their Linears' forward: on GPUs in kernels, Mamba's dt_proj on
# CPUs as well
STATE_SPACES = {
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "mamba",
    "mamba2",
    "nemotron_h",
    "zamba2",
}


class Cache:
    """What generation keeps of the positions so far, in the form of transformers.

    Args:
        config: of a model of transformers; None: it keeps no keys and values, so its tokens are
            kept and read again.

    Attributes:
        newest_only: whether the model returns the newest position's logits alone (B, 1, V), if it
            can.
    """

    newest_only = False

    def __init__(self, config: Any, *, positions: int | None = None) -> None:
        self.positions, self._config = positions, config
        self.clear()

    def clear(self) -> None:
        """Forget all positions."""
        self.length = 0
        self.values: Any = (
            None if self._config is None else _transformers().DynamicCache(config=self._config)
        )


@contextmanager
def _damage_named(pretrained: str) -> Iterator[None]:
    """Name the folder in what transformers raises for its config.json: some errors derive from
    Exception alone.
    """
    try:
        yield
    except NOT_DAMAGE:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"model.pretrained={pretrained}: transformers cannot build the model of its "
            f"config.json ({reason}). "
            "Name another model, correct that entry, or download the folder again"
        ) from error


class PretrainedModel(WrappedModel):
    """A model of transformers, without its weights.

    Args:
        pretrained: the folder whose config.json describes the model, and from which its weights are
            read.
        context: tokens of a row.
        attention: transformers' name of the attention kernel; None: its choice for this model.
        settings: entries of config.json that replace the folder's.

    Raises:
        ValueError: this version of transformers has no such model.
    """

    modality = "tokens"
    unsupported_strategies: ClassVar[dict[str, str]] = {  # read from the source before launch
        "pipeline": "transformers' forward needs all of the model's parts. Type strategy=fsdp"
    }
    auto_class: ClassVar[str]  # of transformers

    def __init__(
        self, *, pretrained: str, context: int, attention: str | None, **settings: Any
    ) -> None:
        super().__init__(pretrained, self._build(pretrained, attention, settings))
        self.context = context
        text = self.inner.config.get_text_config()
        self.width: int | None = getattr(text, "hidden_size", None)
        self.heads: int | None = getattr(text, "num_attention_heads", None)
        self.kv_heads: int | None = getattr(text, "num_key_value_heads", None)

    @classmethod
    def _build(cls, pretrained: str, attention: str | None, settings: dict[str, Any]) -> nn.Module:
        transformers = _transformers()
        content, _ = transformers.PreTrainedConfig.get_config_dict(
            pretrained, local_files_only=True
        )
        kind = content.get("model_type")
        if kind not in transformers.CONFIG_MAPPING:
            raise ValueError(
                f"model.pretrained={pretrained}: transformers {transformers.__version__} has no "
                f"model_type={kind}. Install a newer version: code in a folder is never run"
            )
        with _damage_named(pretrained):
            config = transformers.AutoConfig.from_pretrained(
                pretrained, local_files_only=True, trust_remote_code=False
            )
        for key, value in settings.items():
            setattr(config, key, value)
        options = {} if attention is None else {"attn_implementation": attention}
        built = getattr(transformers, cls.auto_class)
        with _damage_named(pretrained), weights_on(torch.get_default_device()):
            return built.from_config(
                config, dtype=torch.get_default_dtype(), trust_remote_code=False, **options
            )

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of logits (…, classes), in nats, over the targets (…) that
        are not -100.
        """
        return mean_cross_entropy(outputs.flatten(0, -2), targets.flatten())

    @cached_property
    def plan(self) -> Plan | None:
        """How this model may be sharded; None: as one unit."""
        return sharding.plan_of(self.inner, prefix="inner")

    @cached_property
    def other_layers(self) -> list[str]:
        """What reads other positions besides attention: kinds of layers, in transformers' words, or
        a convolution.
        """
        kinds = {
            *(getattr(self.inner.config.get_text_config(), "layer_types", None) or ())
        } - ATTENTION
        text = self.inner.get_decoder()  # without towers of sounds and images
        convolutions = any(isinstance(module, nn.Conv1d) for module in text.modules())
        return sorted(kinds) or ["convolution"] * convolutions

    @property
    def read_directly(self) -> tuple[str, ...]:
        """Last parts of the names of Linears whose weights are read past their forward: adapters
        would do nothing.
        """
        is_read = self.inner.config.get_text_config().model_type in STATE_SPACES
        return ("dt_proj", "out_proj", "x_proj") if is_read else ()

    @override
    def match(self, saved: Mapping[str, Any]) -> Match:
        found = self._read(device_map="meta", ignore_mismatched_sizes=True)[1]
        wrong = {
            name: (tuple(there), tuple(here)) for name, there, here in found["mismatched_keys"]
        }
        return Match(found["missing_keys"], sorted(found["unexpected_keys"]), wrong)

    @override
    def whole_state(self) -> dict[str, Tensor]:
        state = self._read(dtype="auto", ignore_mismatched_sizes=True)[0].state_dict()
        for name, first in self.inner.all_tied_weights_keys.items():
            if name in state and first in state and not state[name].equal(state[first]):
                raise ValueError(
                    f"{self.pretrained}: {name} and {first} are one parameter by config.json, and "
                    "its files hold two values. Set tie_word_embeddings to false in config.json"
                )
        return state

    def _read(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Return the model that transformers reads from the folder, and how its tensors fit."""
        transformers = _transformers()
        log = transformers.logging
        verbosity = log.get_verbosity()
        log.set_verbosity_error()  # `match` returns what it would report
        log.disable_progress_bar()
        try:
            with _damage_named(self.pretrained), torch.device("cpu"):
                return getattr(transformers, self.auto_class).from_pretrained(
                    self.pretrained, config=self.inner.config, local_files_only=True,
                    trust_remote_code=False, use_safetensors=True, output_loading_info=True,
                    **options,
                )  # fmt: skip
        finally:
            log.set_verbosity(verbosity)

    @property
    @override
    def deviation(self) -> float:
        return (
            getattr(self.inner.config.get_text_config(), "initializer_range", None)
            or super().deviation
        )


class CausalLM(PretrainedModel):
    """A causal language model, of any architecture of transformers: AutoModelForCausalLM.

    Args:
        vocab_size: rows for tokens; the check before launch takes it from the folder.
    """

    auto_class = "AutoModelForCausalLM"

    def __init__(
        self,
        *,
        pretrained: str,
        context: int,
        attention: str | None = None,
        vocab_size: int | None = None,
    ) -> None:
        # else BERT and its like, which this class has too, would see the token they are to predict
        super().__init__(
            pretrained=pretrained, context=context, attention=attention, is_decoder=True
        )

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        cache: Cache | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, T, V) of token ids (B, T), or their loss if targets (B, T) are given.

        `documents` (B, T) numbers the documents that a row packs, in order: attention stays within
        each.
        """
        if cache is not None:
            logits = self._continue(inputs, cache)
        else:
            places = {} if documents is None else {"position_ids": positions_within(documents)}
            logits = self.inner(input_ids=inputs, use_cache=False, **places).logits
        return logits if targets is None else self.loss(logits, targets)

    def _continue(self, inputs: Tensor, cache: Cache) -> Tensor:
        """Return the logits of these positions after those in the cache, or of the newest alone."""
        kept: dict[str, Any] = (
            {"logits_to_keep": 1}
            if cache.newest_only and "logits_to_keep" in self._accepted
            else {}
        )
        begin, cache.length = cache.length, cache.length + inputs.shape[1]
        if self._has_cache:
            # Bamba would begin at 0 again; RoBERTa counts its own from the padding token's id
            if self.other_layers and "position_ids" in self._accepted:
                kept["position_ids"] = torch.arange(begin, cache.length, device=inputs.device)[None]
            return self.inner(
                input_ids=inputs, past_key_values=cache.values, use_cache=True, **kept
            ).logits
        cache.values = inputs if cache.values is None else torch.cat([cache.values, inputs], dim=1)
        return self.inner(input_ids=cache.values, use_cache=False, **kept).logits[
            :, -inputs.shape[1] :
        ]

    @cached_property
    def _accepted(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.inner.forward).parameters)

    @property
    def _has_cache(self) -> bool:
        """Whether the model keeps keys and values: recurrent ones, such as Mamba, keep states of
        their own.
        """
        return "past_key_values" in self._accepted

    def make_cache(self, *, positions: int | None = None) -> Cache:
        return Cache(self.inner.config if self._has_cache else None, positions=positions)


class SequenceClassifier(PretrainedModel):
    """A classifier of texts, of any architecture of transformers:
    AutoModelForSequenceClassification.

    Args:
        classes: outputs of the head (N).
        new_head: begin with a random head, whatever head the folder has. A folder without one needs
            no such word.
        vocab_size: rows for tokens; the check before launch takes it from the folder.
    """

    modality = "labeled texts"
    auto_class = "AutoModelForSequenceClassification"

    def __init__(
        self,
        *,
        pretrained: str,
        context: int,
        classes: int,
        new_head: bool = False,
        attention: str | None = None,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(
            pretrained=pretrained,
            context=context,
            attention=attention,
            num_labels=classes,
            use_cache=False,
        )
        self.new_head = new_head
        text = self.inner.config.get_text_config()
        padding = getattr(text, "pad_token_id", None)
        # now: an embedding that knows it has no gradient for its row
        if padding is None or padding < 0:
            end = getattr(text, "eos_token_id", None)
            text.pad_token_id = (end[0] if isinstance(end, list) else end) or 0
        self.padding: int = text.pad_token_id

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits (B, N) of token ids (B, T), where -100 is padding, or their loss if targets
        (B,) are given.
        """
        held_BT = inputs != IGNORED
        outputs = self.inner(
            input_ids=inputs.where(held_BT, self.padding), attention_mask=held_BT.long()
        )
        return outputs.logits if targets is None else self.loss(outputs.logits, targets)

    @override
    def is_head(self, name: str) -> bool:
        """Return whether a parameter (by its name in `inner`) is not of the model below the
        head.
        """
        return self.inner.base_model is not self.inner and not name.startswith(
            f"{self.inner.base_model_prefix}."
        )

    @override
    def may_be_new(self, name: str) -> bool:
        return self.is_head(name) or ".pooler." in name  # which models of masked words lack

    @override
    def may_be_left(self, name: str) -> bool:
        """As the head that predicts words, or a pooler.

        The files of a model without any head lack the prefix.
        """
        own = {
            self.inner.base_model_prefix,
            *(child for child, _ in self.inner.base_model.named_children()),
        }
        return name.partition(".")[0] not in own or ".pooler." in name


def positions_within(documents_BT: Tensor) -> Tensor:
    """Return each position's place in its document. transformers keeps attention within them if
    these begin anew.
    """
    place_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = documents_BT.diff(prepend=documents_BT[:, :1] - 1) != 0
    return place_T - (begins_BT * place_T).cummax(dim=1).values


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError(
            f"transformers is not installed ({error}). Type make setup EXTRAS=finetune"
        ) from error
