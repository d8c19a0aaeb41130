"""Models of runs that generate text in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from armature import loading
from armature.data import tokenizer as tokens
from armature.data.chat.template import ChatTemplate, Message
from armature.errors import ConfigError
from armature.finetune import folder
from armature.models.decoder import generation

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, its tokenizer with the folder it is from, and the ids that end a
    text.
    """

    model: nn.Module
    folder: Path
    tokenizer: Tokenizer
    ends: list[int]


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
    tokenizer = tokens.read(run_dir / folder.TOKENIZER)
    ends, begins = [] if kept is None else folder.end_tokens(kept), tokens.document_token(tokenizer)
    # a text ends where the next document begins if the folder does not say
    return Loaded(model, run_dir, tokenizer, ends or ([] if begins is None else [begins]))


def answers(
    loaded: Loaded, chats: Sequence[Sequence[Message]], *, template: ChatTemplate, **options: Any
) -> list[str]:
    """Return the assistant's next message in each conversation, generated together.

    Options are `complete`'s.
    """
    tokenizer, end = loaded.tokenizer, template.end_of_turn
    texts = [template.render(messages, add_generation_prompt=True) for messages in chats]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    last = tokenizer.encode(end, add_special_tokens=False).ids if end else []
    ends = [*(last if len(last) == 1 else []), *loaded.ends]
    found = generation.complete(loaded.model, prompts, eot=ends, **options)
    new = [ids[len(prompt) :] for ids, prompt in zip(found, prompts, strict=True)]
    decoded = (
        tokenizer.decode(ids[: -1 if ids[-1] in ends else None], skip_special_tokens=False)
        for ids in new
    )
    return [(text.partition(end)[0] if end else text).strip() for text in decoded]
