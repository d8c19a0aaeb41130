"""Preference data: each sample is a pair of conversations, the chosen one and the rejected one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from typing_extensions import override

from armature.data.base import Batch, Split
from armature.data.chat.data import ChatData, Rows
from armature.data.chat.preferences import Preferences
from armature.models.loss import IGNORED


class Pairs(Rows):
    """Pairs as inputs and targets (2, T), of which -100 are not scored.

    Args:
        multiple: T is the length of the batch's longest conversation, rounded up to a multiple of
            this, and at most `context`; None: always `context`.
    """

    def __init__(
        self,
        source: Preferences,
        split: Split,
        *,
        multiple: int | None = None,
    ) -> None:
        super().__init__(source, split)
        self.multiple = multiple

    @override
    def batch(self, indices: list[int]) -> Batch:
        """Return inputs and targets, each (B, 2, T) of int64."""
        rows, members = self.arrays["rows"], self.arrays["members"]
        found = [
            self.conversation(member) for i in indices for member in members[rows[i] : rows[i + 1]]
        ]
        length = self._length(max(len(own) for own, _ in found))
        inputs, targets = (
            np.zeros((len(found), length), np.int64),
            np.full((len(found), length), IGNORED, np.int64),
        )
        for row, (own_inputs, own_targets) in enumerate(found):
            inputs[row, : len(own_inputs)], targets[row, : len(own_targets)] = (
                own_inputs,
                own_targets,
            )
        shape = (len(indices), 2, length)
        return {
            "inputs": torch.from_numpy(inputs).view(shape),
            "targets": torch.from_numpy(targets).view(shape),
        }

    def _length(self, longest: int) -> int:
        if self.multiple is None:
            return self.context
        return min(self.context, -(-longest // self.multiple) * self.multiple)


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
    def dataset(self, split: Split) -> Pairs | None:
        if split == "predict" or (
            split != "train" and not self.source.header["splits"][split]["rows"]
        ):
            return None
        return Pairs(self.source, split, multiple=self.multiple)
