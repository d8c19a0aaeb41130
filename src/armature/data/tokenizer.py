"""Byte-level byte-pair encoding: every text has tokens, which decode to exactly the same text.

Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from armature import files
from armature.errors import ConfigError, error_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
# usual names of the token between documents. Where a tokenizer has one for their beginning and one
# for their end, the beginning comes first here
BEGINNINGS = (END_OF_TEXT, "<|begin_of_text|>", "<bos>", "<s>", "</s>", "<eos>", "<|end_of_text|>")


def train(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Return a tokenizer of at most `vocab_size` tokens (fewer if no pairs are left to merge).

    END_OF_TEXT is 0.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def write(tokenizer: Tokenizer, file: Path) -> None:
    """Write the tokenizer as its own `save` does, whose errors are no OSError."""
    files.replace(file, tokenizer.to_str(pretty=True))


def read(file: Path) -> Tokenizer:
    """Return a tokenizer that reads special tokens in a text as such, and neither cuts nor pads.

    Raises ConfigError.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise ConfigError(f"{file} is damaged, or no tokenizer ({error_line(error)}).") from None
    tokenizer.no_truncation()  # transformers saves those of its last call with a tokenizer
    tokenizer.no_padding()
    return tokenizer


def load(path: Path) -> Tokenizer:
    """Return a tokenizer for a corpus, in which END_OF_TEXT is plain characters.

    Raises ConfigError.
    """
    tokenizer = read(path)
    tokenizer.encode_special_tokens = True  # not saved
    return tokenizer


def document_token(tokenizer: Tokenizer) -> int | None:
    """Return the id that each document of a corpus begins with, found by its usual names, or
    None.
    """
    return next((i for i in map(tokenizer.token_to_id, BEGINNINGS) if i is not None), None)


def find(name: str, *, key: str = "data.source.tokenizer") -> Path:
    """Return the tokenizer.json of this name, or in the folder of this name. Raises ConfigError."""
    path = Path(name).expanduser()
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"{key}={name}: there is no {TOKENIZER_FILE}. Name a folder that holds one: a model's "
            "from Hugging Face, or a run's."
        )
    return file


def load_external(path: str) -> Tokenizer:
    """Return a tokenizer that was trained elsewhere, by another run or by Hugging Face.

    Raises ConfigError.
    """
    tokenizer = load(find(path))
    if document_token(tokenizer) is None:
        raise ConfigError(
            f"data.source.tokenizer={path}: it has none of {', '.join(BEGINNINGS)} to begin "
            "documents with."
        )
    return tokenizer


@contextmanager
def all_cores() -> Iterator[None]:
    """Let tokenizers use threads in this block only: threads hang a process forked later, and the
    library warns.
    """
    key = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(key)
    os.environ[key] = before or "true"
    try:
        yield
    finally:
        os.environ[key] = before or "false"
