"""Chat data: rows of conversations, in which only what the assistant wrote is a target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset
from typing_extensions import override

from armature import files
from armature.data.base import Batch, Split
from armature.data.chat.source import Conversations
from armature.data.text import TokenData
from armature.finetune.folder import CHAT_TEMPLATE, TOKENIZER_CONFIG
from armature.models.loss import IGNORED


class Rows(Dataset[Batch]):
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
    def __getitem__(self, index: int) -> Batch:
        return {name: tensor[0] for name, tensor in self.batch([index]).items()}

    def batch(self, indices: list[int]) -> Batch:
        """Return inputs, targets and, if packed, documents: each (B, T), of int64, int64 and
        int32.
        """
        shape = (len(indices), self.context)
        inputs, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        documents = np.zeros(shape, np.int32)
        rows = self.arrays["rows"]
        for b, index in enumerate(indices):
            t = 0
            members = self.arrays["members"][rows[index] : rows[index + 1]]
            for document, member in enumerate(members):
                own_inputs, own_targets = self.conversation(member)
                end = t + len(own_inputs)
                inputs[b, t:end], targets[b, t:end], documents[b, t:end] = (
                    own_inputs,
                    own_targets,
                    document,
                )
                t = end
            documents[b, t:] = len(members)
        found = {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}
        return found | {"documents": torch.from_numpy(documents)} if self.packing else found

    def conversation(self, member: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return one conversation's inputs and targets."""
        first, end = self.arrays["starts"][member : member + 2]
        ids, learned = self.arrays["ids"][first:end], self.arrays["learned"][first + 1 : end]
        return ids[:-1], np.where(learned, ids[1:].astype(np.int64), IGNORED)


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
        if split == "predict" or (
            split != "train" and not self.source.header["splits"][split]["rows"]
        ):
            return None
        return Rows(self.source, split)

    @property
    def vocab_size(self) -> int | None:
        return self.source.vocab_size

    @override
    def save_assets(self, run_dir: Path) -> None:
        super().save_assets(run_dir)
        template = self.source.template
        files.replace(run_dir / CHAT_TEMPLATE, template.source)
        files.replace(
            run_dir / TOKENIZER_CONFIG, json.dumps(dict(template.special), indent=2) + "\n"
        )
