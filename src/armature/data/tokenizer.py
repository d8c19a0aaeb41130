"""Byte-pair encoding of bytes: whatever the text, it has tokens, and they decode to the very same text. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
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
