"""Byte-pair encoding of bytes: whatever the text, it has tokens, and they decode to the very same text. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from armature.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
# what parts documents elsewhere: that which they begin with, where a tokenizer tells it from their end
BEGINNINGS = (END_OF_TEXT, "<|begin_of_text|>", "<bos>", "<s>", "</s>", "<eos>", "<|end_of_text|>")
SMALLEST_VOCABULARY = 257  # every byte, and END_OF_TEXT


def train(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """A tokenizer of at most `vocab_size` tokens (fewer if the text has no more pairs to merge); END_OF_TEXT is 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def load(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True  # END_OF_TEXT in a text is eleven characters, not the end of it; not saved
    return tokenizer


def document_token(tokenizer: Tokenizer) -> int | None:
    """The id that each document begins with in our corpora, by the names that are usual; None where there is none."""
    return next((i for i in map(tokenizer.token_to_id, BEGINNINGS) if i is not None), None)


def given(path: str) -> Tokenizer:
    """A tokenizer that was trained elsewhere: of another run, or Hugging Face's.

    Raises:
        ConfigError: for a file that is none, or that has no token to part documents with.
    """
    if not Path(path).is_file():
        raise ConfigError(
            f"data.source.tokenizer={path}: no such file. Name a tokenizer.json: a run directory has one, and so has a "
            "model from Hugging Face."
        )
    try:
        tokenizer = load(Path(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"data.source.tokenizer={path}: {error}. Name a tokenizer.json.") from error
    if document_token(tokenizer) is None:
        raise ConfigError(
            f"data.source.tokenizer={path}: it has none of {', '.join(BEGINNINGS)} to part documents with."
        )
    return tokenizer


@contextmanager
def all_cores() -> Iterator[None]:
    """Tokenizers in threads here, and not afterwards: they hang a process forked later, and the library warns of it."""
    key = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(key)
    os.environ[key] = before or "true"
    try:
        yield
    finally:
        os.environ[key] = before or "false"
