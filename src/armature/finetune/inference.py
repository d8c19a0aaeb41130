"""Models that generate text in one process: of a run, or of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from armature import loading
from armature.data import tokenizer as tokens
from armature.data.chat.template import ChatTemplate, Message
from armature.errors import ConfigError
from armature.finetune import architecture, built, check, folder, others
from armature.finetune.export import DTYPES, read_decoder, read_meta
from armature.models.decoder import generation

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST = 8192  # positions; of a longer text, the newest half of them is read again


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, its tokenizer with the folder it is from, and the ids that end a
    text.
    """

    model: nn.Module
    folder: Path
    tokenizer: Tokenizer
    ends: list[int]

    @classmethod
    def of(cls, model: nn.Module, path: Path, ends: list[int]) -> Loaded:
        """Read the tokenizer.

        A text ends where the next document begins if the folder does not say.
        """
        tokenizer = _tokenizer(path / folder.TOKENIZER)
        begins = tokens.document_token(tokenizer)
        return cls(model, path, tokenizer, ends or ([] if begins is None else [begins]))


def load_run(
    path: Path,
    *,
    device: str = "cpu",
    best: bool = False,
    overrides: Sequence[str] = (),
    trust: bool = False,
) -> Loaded:
    """Load the model of a run or of one of its checkpoints.

    Options and errors are those of `loading.open_run`.
    """
    cfg, checkpoint = loading.open_run(path, best=best, overrides=[*overrides], trust=trust)
    run_dir = Path(cfg.run.dir)
    if not (run_dir / folder.TOKENIZER).exists():
        raise ConfigError(
            f"{path}: this run's data have no tokenizer, so there is no text to sample."
        )
    kept = folder.kept_in(run_dir)
    model = loading.load_task(cfg, checkpoint).get_submodule("model").to(device)
    return Loaded.of(model, run_dir, [] if kept is None else folder.end_tokens(kept))


def load(path: Path, *, device: str = "cpu") -> Loaded:
    """Load a model's folder: on CPUs in fp32, else in the folder's type.

    What the decoder does not compute, transformers does. Raises ConfigError for a folder that is no
    language model's, or is not whole.
    """
    try:
        model = _read(path, device=device)
    except ConfigError as error:  # of a folder that nobody typed as a setting
        raise ConfigError(
            [each.replace(f"{check.KEY}=", "", 1) for each in error.problems]
        ) from error
    if not (path / folder.TOKENIZER).is_file():
        raise ConfigError(
            f"{path}: there is no {folder.TOKENIZER}. Copy that of the model into it."
        )
    return Loaded.of(model, path, folder.end_tokens(path))


def _read(whole: Path, *, device: str) -> nn.Module:
    config, name = folder.config(whole), str(whole)
    kind = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    dtype = getattr(torch, kind) if device != "cpu" and kind in DTYPES else torch.float32
    try:
        args = architecture.arguments(config, name=name)
    except ConfigError as refused:
        return read_meta(_built_by_transformers(whole, config, refused).to(dtype), device=device)
    if problems := check.weight_problems(whole, args):
        raise ConfigError(problems)
    longest = min(architecture.longest_context(config) or LONGEST, LONGEST)
    return read_decoder(whole, context=longest, device=device, dtype=dtype)


def _built_by_transformers(whole: Path, config: dict[str, Any], refused: ConfigError) -> nn.Module:
    """Return the model of a folder that the decoder has `refused`, on the meta device."""
    try:
        others.arguments(config, name=str(whole))
    except ConfigError as error:
        is_ours = config.get("model_type") in architecture.FAMILIES
        raise ConfigError([*(refused.problems if is_ours else []), *error.problems]) from None
    named = [str(each) for each in config.get("architectures") or []]
    if named and all(
        each.endswith(("Classification", "MaskedLM", "QuestionAnswering")) for each in named
    ):
        raise ConfigError(
            f"{whole}: architectures={', '.join(named)}: no model that continues texts. Name a "
            "causal model."
        )
    node = {
        "_target_": others.CAUSAL,
        "_partial_": True,
        "pretrained": str(whole),
        "context": LONGEST,
    }
    model = built.build(node)
    if problems := built.weight_problems(model):
        raise ConfigError(problems)
    # also of GPT-2's n_positions
    own = getattr(model.inner.config.get_text_config(), "max_position_embeddings", None)
    longest = architecture.longest_context(config) or own, built.positions(model)
    model.context = min([LONGEST, *filter(None, longest)])  # BLOOM and Mamba say nothing
    return model


def answers(
    loaded: Loaded, chats: Sequence[Sequence[Message]], *, template: ChatTemplate, **options: Any
) -> list[str]:
    """Return the assistant's next message in each conversation, generated together.

    Options are `complete`'s.
    """
    tokenizer, end, room = loaded.tokenizer, template.end_of_turn, int(loaded.model.context)  # pyright: ignore[reportArgumentType]
    texts = [template.render(messages, add_generation_prompt=True) for messages in chats]
    prompts = [
        tokenizer.encode(text, add_special_tokens=False).ids[-(room - 1) :] for text in texts
    ]
    last = tokenizer.encode(end, add_special_tokens=False).ids if end else []
    ends = [*(last if len(last) == 1 else []), *loaded.ends]
    found = generation.complete(loaded.model, prompts, eot=ends, **options)
    new = [ids[len(prompt) :] for ids, prompt in zip(found, prompts, strict=True)]
    decoded = (
        tokenizer.decode(ids[: -1 if ids[-1] in ends else None], skip_special_tokens=False)
        for ids in new
    )
    return [(text.partition(end)[0] if end else text).strip() for text in decoded]


def _tokenizer(file: Path) -> Tokenizer:
    if file.is_file() and (problem := folder.tokens_problem(file)):
        raise ConfigError(problem)
    try:
        return tokens.read(file)
    except ConfigError as error:
        raise ConfigError(f"{error} Copy it from another run on the same data.") from error
