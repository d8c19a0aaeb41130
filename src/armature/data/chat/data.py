"""Chat data: rows of conversations, in which only what the assistant wrote is a target, and pairs
of them, of which one was preferred.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from armature import files
from armature.data.base import Batch, Split
from armature.data.chat.source import Conversations, Preferences, token_ids
from armature.data.samples import Batched
from armature.data.text import TokenData, padded
from armature.finetune.folder import CHAT_TEMPLATE, TOKENIZER_CONFIG
from armature.models.loss import IGNORED


class Rows(Batched):
    """Rows of `context` tokens: inputs, targets (-100: not learned) and, if packed, the number of
    each one's document.

    A conversation of n tokens has n - 1 inputs. Padding is a document of its own, so that nothing
    sees it.
    """

    def __init__(self, source: Conversations, split: Split) -> None:
        self.context, self.packing = source.context, source.packing
        self.arrays = source.arrays(split)

    def __len__(self) -> int:
        return len(self.arrays["rows"]) - 1

    @override
    def batch(self, indices: list[int]) -> Batch:
        """Return inputs, targets and, if packed, documents: each (B, T), of int64, int64 and
        int32.
        """
        rows = [self.conversations(index) for index in indices]
        inputs, targets = (
            [np.concatenate([each[i] for each in row]) for row in rows] for i in (0, 1)
        )
        found = {
            "inputs": padded(inputs, fill=0, most=self.context),
            "targets": padded(targets, fill=IGNORED, most=self.context),
        }
        if not self.packing:
            return found
        documents = []
        for row in rows:
            lengths = [len(inputs) for inputs, _ in row]
            lengths.append(self.context - sum(lengths))
            documents.append(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))
        return found | {"documents": torch.from_numpy(np.stack(documents))}

    def conversations(self, index: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Return the inputs and targets of each conversation of a row."""
        rows, found = self.arrays["rows"], []
        for member in self.arrays["members"][rows[index] : rows[index + 1]]:
            first, end = self.arrays["starts"][member : member + 2]
            tokens = self.arrays["tokens"][first:end]
            found.append((token_ids(tokens[:-1]), np.where(tokens[1:] < 0, IGNORED, tokens[1:])))
        return found


class Pairs(Rows):
    """Pairs as inputs and targets (2, T), of which -100 are not scored.

    Args:
        multiple: T is the length of the batch's longest conversation, rounded up to a multiple of
            this, and at most `context`; None: always `context`.
    """

    def __init__(self, source: Preferences, split: Split, *, multiple: int | None) -> None:
        super().__init__(source, split)
        self.multiple = multiple

    @override
    def batch(self, indices: list[int]) -> Batch:
        """Return inputs and targets, each (B, 2, T) of int64."""
        sides = [side for index in indices for side in self.conversations(index)]
        return {
            name: padded(
                [side[i] for side in sides], fill=fill, most=self.context, multiple=self.multiple
            ).unflatten(0, (len(indices), 2))
            for i, (name, fill) in enumerate({"inputs": 0, "targets": IGNORED}.items())
        }


class ChatData(TokenData):
    """Conversations; see `Conversations`, the source.

    The run directory keeps the tokenizer and the chat template.
    """

    source: Conversations

    @override
    def prepare_data(self) -> None:
        _ = self.source.header  # what is in it was said before the launch

    @override
    def dataset(self, split: Split) -> Rows | None:
        return self.rows(split) if self.source.header["splits"].get(split, {}).get("rows") else None

    def rows(self, split: Split) -> Rows:
        return Rows(self.source, split)

    @property
    def vocab_size(self) -> int | None:
        return self.source.vocab_size

    @override
    def save_assets(self, run_dir: Path) -> None:
        super().save_assets(run_dir)
        template = self.source.chat_template
        files.replace(run_dir / CHAT_TEMPLATE, template.source)
        special = json.dumps(dict(template.special), indent=2)
        files.replace(run_dir / TOKENIZER_CONFIG, f"{special}\n")


class PreferenceData(ChatData):
    """Pairs of conversations; see `Preferences`, the source. Batch sizes count pairs.

    Args:
        multiple: rows of a batch are as long as its longest conversation, rounded up to a multiple
            of this; None: of `context` tokens.
    """

    gives = "pairs"  # read from the source before launch
    source: Preferences  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self, source: Preferences, *, context: int, path: Any = None, multiple: int | None = 64
    ) -> None:
        super().__init__(source, context=context, path=path)
        self.multiple = multiple
        self.tokens_per_sample = None  # it differs from pair to pair

    @override
    def rows(self, split: Split) -> Pairs:
        return Pairs(self.source, split, multiple=self.multiple)
