"""Language modeling data: windows of a corpus's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset
from typing_extensions import override

from armature.data.base import Batch, DataModule, Split
from armature.data.corpus import Corpus
from armature.data.samples import Batched
from armature.data.tokenizer import TOKENIZER_FILE, write
from armature.errors import ConfigError
from armature.models.loss import IGNORED

if TYPE_CHECKING:
    from tokenizers import Tokenizer


PROMPT_WINDOW, PROMPT_WORDS = 128, 2  # tokens to look for a line in, and words of it, in a prompt


class TokenData(DataModule):
    """Next-token prediction on `context` tokens per sample.

    Args:
        source: a Corpus or TokenFiles with the same context.
        path: the path that `source` reads; an argument here so that it can be typed as data.path.
    """

    def __init__(self, source: Any, *, context: int, path: str | list[str] | None = None) -> None:
        super().__init__()
        self.source, self.context, self.path = source, context, path
        self.tokens_per_sample = context

    @override
    def dataset(self, split: Split) -> Dataset[Any] | None:
        return Windows(self.source.tokens(split), context=self.context, whole=split != "train")

    @override
    def prepare_data(self) -> None:
        self.source.prepare()

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.source.loaded_tokenizer

    @override
    def save_assets(self, run_dir: Path) -> None:
        if self.tokenizer is not None:
            write(self.tokenizer, run_dir / TOKENIZER_FILE)

    @override
    def load_assets(self, run_dir: Path) -> None:
        """Read text with the tokens that the trained model knows, whatever its files hold now."""
        file = run_dir / TOKENIZER_FILE
        if getattr(self.source, "tokenizer", "") is None and file.is_file():
            self.source.tokenizer = str(file)

    def prompts(self) -> list[str]:
        """Return beginnings of lines of held-out text, to show what a model makes of them; [] if
        none can be read.
        """
        samples: Any = self._dataset("val")
        if self.tokenizer is None or not len(samples):
            return []
        found = [samples[len(samples) * i // 6]["inputs"] for i in (1, 3, 5)]
        texts = [self.tokenizer.decode(inputs[:PROMPT_WINDOW].tolist()) for inputs in found]
        return [prompt for text in texts if (prompt := beginning(text))]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "corpus": self.source.fingerprint}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["corpus"] != self.source.fingerprint:
            raise ConfigError(
                f"The checkpoint was made with other tokens ({state_dict['corpus']}) than "
                f"data.path has now ({self.source.fingerprint}): its files or settings of "
                "data.source have changed. Restore those that it was trained with, or type another "
                "run.name to start at step 0. To use its weights alone, see docs/resume.md."
            )
        super().load_state_dict(state_dict)


def beginning(text: str) -> str:
    """Return the first words of the least indented line, other than the first and the last, which
    may be cut.
    """
    lines = [line for line in text.split("\n")[1:-1] if len(line.split()) > 1] or [
        text.partition(" ")[2]
    ]
    line = min(lines, key=lambda line: len(line) - len(line.lstrip()))
    return " ".join(line.split()[:PROMPT_WORDS])


def padded(
    rows: Sequence[NDArray[Any]], *, fill: int, most: int, multiple: int | None = None
) -> torch.Tensor:
    """Return rows of tokens as one tensor (B, T), int64, filled up at their ends.

    T is the longest one's length, rounded up to a multiple, and at most `most`; without a multiple
    it is `most`.
    """
    longest = max(map(len, rows))
    length = most if multiple is None else min(most, -(-longest // multiple) * multiple)
    found = np.full((len(rows), length), fill, np.int64)
    for row, own in zip(found, rows, strict=True):
        row[: len(own)] = own
    return torch.from_numpy(found)


class TextData(TokenData):
    """Windows of a prepared corpus. Windows do not overlap, and may cross document ends.

    Training skips the few tokens of the last, incomplete window. Validation and test count every
    token once.
    """

    source: Corpus

    @property
    def vocab_size(self) -> int:
        return self.source.vocab_size

    def bytes_per_token(self, split: str) -> float:
        """Return the bytes of text per predicted token: bits per byte are loss in nats per token /
        ln 2 / this.

        Exact for val and test. The ends of documents are predicted tokens without bytes.
        """
        statistics = self.source.header["splits"][split]
        return statistics["bytes"] / (statistics["tokens"] - 1)


class Windows(Batched):
    """Sample i predicts tokens [i·T + 1, (i + 1)·T + 1) from the T = `context` tokens one place
    before each.

    `tokens` has the shape (tokens,) and is usually memory-mapped. `whole` serves the incomplete
    window at the end too, with -100 for its missing targets: each token but the first is then a
    target exactly once.
    """

    def __init__(
        self, tokens: NDArray[np.unsignedinteger[Any]], *, context: int, whole: bool
    ) -> None:
        self.tokens, self.context = tokens, context
        targets = max(len(tokens) - 1, 0)
        self.size = -(-targets // context) if whole else targets // context

    def __len__(self) -> int:
        return self.size

    @override
    def batch(self, indices: list[int]) -> Batch:
        """Return inputs and targets, each (B, T) and int64."""
        size, tokens = self.context, np.asarray(self.tokens)  # whose slices are fast
        windows = np.full((len(indices), size + 1), IGNORED)
        for window, i in zip(windows, indices, strict=True):
            part = tokens[i * size : (i + 1) * size + 1]
            window[: len(part)] = part
        inputs, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
        inputs[inputs == IGNORED] = 0
        return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}
