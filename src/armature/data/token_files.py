"""Token ids that other tools have written, as nanoGPT's train.bin and val.bin."""

import hashlib
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from armature.data import cache
from armature.data import tokenizer as tokenizers
from armature.data.text import TokenData
from armature.errors import ConfigError

_CHECKED_FIRST = 1 << 20  # tokens of each split that are checked before a run


@dataclass(eq=False)
class TokenFiles:
    """Tokens of each split, memory-mapped.

    Attributes:
        path: a folder with train.bin, val.bin and perhaps test.bin; or one .bin file, whose end is
            held out.
        dtype: of the tokens; nanoGPT writes uint16.
        vocab_size: tokens of the model.
        val_fraction, test_fraction: shares of a single file.
        tokenizer: the tokenizer.json that made the tokens, for generate.py; None: there is none.
    """

    path: str
    _: KW_ONLY
    context: int
    vocab_size: int
    dtype: str = "uint16"
    val_fraction: float = 0.01
    test_fraction: float = 0.01
    tokenizer: str | None = None

    def check(self) -> None:
        """Check the files. Raises ConfigError."""
        if self.tokenizer is not None:
            tokenizers.find(self.tokenizer)
        if np.iinfo(self.dtype).max < self.vocab_size - 1:
            raise ConfigError(
                f"data.source.dtype={self.dtype} holds no ids of data.source.vocab_size="
                f"{self.vocab_size}. Type the dtype of the files, such as uint32."
            )
        train = self.tokens("train")
        if len(train) <= self.context:
            raise ConfigError(
                f"data.context={self.context} is longer than the {len(train):,} tokens of "
                f"{self.path}. Type data.context={max(len(train) - 1, 1)} or less, or name more "
                "tokens."
            )
        first = train[:_CHECKED_FIRST]
        if first[::2].any() and not first[1::2].any():
            raise ConfigError(
                f"data.source.dtype={self.dtype}: every second token of {self.path} is 0, as if "
                "its numbers were wider. Type their dtype, such as data.source.dtype=uint32."
            )
        for split in ("train", "val", "test"):
            if not len(tokens := self.tokens(split)[:_CHECKED_FIRST]):
                continue
            least, largest = tokens.min(), tokens.max()
            if least < 0 or largest >= self.vocab_size:
                raise ConfigError(
                    f"data.source.vocab_size={self.vocab_size}, but {self.path} holds the token "
                    f"{least if least < 0 else largest} ({split} split). Type the size of the "
                    "vocabulary that made the tokens (GPT-2: 50257), or their data.source.dtype, "
                    f"which is not {self.dtype} if other programs write them so."
                )

    prepare = check  # nothing is written

    def tokens(self, split: str) -> Any:
        """Return the token ids of a split, shape (tokens,), or an empty array if there is no such
        file.
        """
        path = Path(self.path).expanduser()
        if path.is_dir():
            file = path / f"{split}.bin"
            if file.is_file():
                return self._open(file)
            if split != "train":
                return np.empty(0, np.uint16)
        if not path.is_file():
            raise ConfigError(
                f"data.path={path}: there is no such .bin file, nor a folder with train.bin. Name "
                "one that is there."
            )
        every = self._open(path)
        val, test = (int(len(every) * share) for share in (self.val_fraction, self.test_fraction))
        end = max(len(every) - val - test, 0)
        return np.split(every, [end, end + val])[("train", "val", "test").index(split)]

    def _open(self, file: Path) -> Any:
        dtype, size = np.dtype(self.dtype), file.stat().st_size
        if size % dtype.itemsize or not size or file.suffix != ".bin":
            raise ConfigError(
                f"data.path: {file} is no .bin file of a whole number of {dtype} tokens ({size} "
                f"bytes). Write the ids without a header, as NumPy's ids.astype('{dtype}').tofile("
                "'train.bin') does, or type their own data.source.dtype."
            )
        return cache.Mapped(file, dtype=dtype, mode="r")

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the numbers of tokens and of the first and last of them."""
        train = self.tokens("train")
        ends = np.r_[train[:4096], train[-4096:]].astype(np.int64).tobytes()
        return hashlib.sha256(f"{len(train)}/{self.context}/".encode() + ends).hexdigest()[:16]

    @cached_property
    def loaded_tokenizer(self) -> Any:
        return None if self.tokenizer is None else tokenizers.load_external(self.tokenizer)


class TokenFileData(TokenData):
    """Windows of tokens that another tool has written."""

    source: TokenFiles
