"""Preference data: each sample is a pair of conversations, the chosen one and the rejected one."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from armature import files
from armature.data.base import Batch, Split
from armature.data.chat.data import ChatData, Rows
from armature.data.chat.preferences import Preferences
from armature.data.chat.source import SPLITS
from armature.errors import ConfigError
from armature.models.loss import IGNORED

REFERENCE_FILE = "reference.npz"  # in the run directory


class Pairs(Rows):
    """Pairs as inputs and targets (2, T), of which -100 are not scored, and the reference's
    log-probabilities (2,).

    Args:
        multiple: T is the length of the batch's longest conversation, rounded up to a multiple of
            this, and at most `context`; None: always `context`.
        reference: log-probabilities of the answers under the reference model, (pairs, 2); None: not
            known.
    """

    def __init__(
        self,
        source: Preferences,
        split: Split,
        *,
        multiple: int | None = None,
        reference: Tensor | None = None,
    ) -> None:
        super().__init__(source, split)
        self.multiple, self.reference = multiple, reference

    @override
    def batch(self, indices: list[int]) -> Batch:
        """Return inputs and targets, each (B, 2, T) of int64, and if it is known `reference` (B,
        2), fp32 as int32.
        """
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
        batch = {
            "inputs": torch.from_numpy(inputs).view(shape),
            "targets": torch.from_numpy(targets).view(shape),
        }
        if self.reference is None:
            return batch
        # as bits: precision plugins (of bf16-true, DeepSpeed's) round the floats of a batch to 16
        # bits
        return batch | {"reference": self.reference[indices].view(torch.int32)}

    def _length(self, longest: int) -> int:
        if self.multiple is None:
            return self.context
        return min(self.context, -(-longest // self.multiple) * self.multiple)


class PreferenceData(ChatData):
    """Pairs of conversations; see `Preferences`, the source. Batch sizes count pairs.

    Args:
        multiple: rows of a batch are as long as its longest conversation, rounded up to a multiple
            of this; None: of `context` tokens.

    Attributes:
        reference: per split, log-probabilities of all answers under the reference model, (pairs, 2)
            of fp32; None: they were not computed. Checkpoints hold them, and the run directory, for
            evaluation.
    """

    gives = "pairs"  # read from the source before launch
    source: Preferences  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self, source: Preferences, *, context: int, path: Any = None, multiple: int | None = 64
    ) -> None:
        super().__init__(source, context=context, path=path)
        self.multiple = multiple
        self.tokens_per_sample = None  # it differs from pair to pair
        self.reference: dict[str, Tensor] | None = None

    @override
    def dataset(self, split: Split) -> Pairs | None:
        if split == "predict" or (
            split != "train" and not self.source.header["splits"][split]["rows"]
        ):
            return None
        known = None if self.reference is None else self.reference.get(split)
        return Pairs(self.source, split, multiple=self.multiple, reference=known)

    # ------------------------------------------------------------ reference log-probabilities
    def splits(self) -> dict[str, int]:
        """Return the splits that have pairs, and how many."""
        sizes: dict[str, int] = {
            split: self.source.header["splits"][split]["rows"] for split in SPLITS
        }
        return {split: size for split, size in sizes.items() if size}

    def share(
        self, split: Split, *, size: int, rank: int, ranks: int
    ) -> Iterator[tuple[list[int], Batch]]:
        """Yield a data rank's part of a split in batches of a size, with the pairs' indices: as
        many on every rank.

        Each pair comes at least once over all ranks; some come twice.
        """
        pairs, last = self._dataset(split), self.splits()[split] - 1
        for first in range(0, last + 1, size * ranks):
            indices = [min(first + rank * size + i, last) for i in range(size)]
            yield indices, pairs.batch(indices)  # pyright: ignore[reportAttributeAccessIssue]

    def set_reference(self, reference: dict[str, Tensor]) -> None:
        """Let batches hold the reference's log-probabilities, by split, from now on."""
        self.reference = reference
        for split, pairs in self._datasets.items():
            if isinstance(pairs, Pairs):
                pairs.reference = reference[split]

    def write_reference(self, run_dir: Path) -> None:
        """Write the reference's log-probabilities, if there are any, for the evaluation of the
        trained model.
        """
        if self.reference is not None:
            arrays = {split: values.numpy() for split, values in self.reference.items()}
            with files.replacing(run_dir / REFERENCE_FILE) as part:
                np.savez(part, fingerprint=np.array(self.source.fingerprint), **arrays)  # pyright: ignore[reportArgumentType]

    @override
    def save_assets(self, run_dir: Path) -> None:
        super().save_assets(run_dir)
        self.write_reference(run_dir)

    @override
    def load_assets(self, run_dir: Path) -> None:
        """Read the reference of the run's own pairs. For other pairs there is none."""
        super().load_assets(run_dir)
        file = run_dir / REFERENCE_FILE
        if not file.is_file():
            return
        try:
            with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in arrays.files}
                made_for = str(found.pop("fingerprint"))
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"{file} cannot be read ({error}). Resume the run once, which writes it again."
            ) from error
        if made_for == self.source.fingerprint:
            self.set_reference({split: torch.from_numpy(values) for split, values in found.items()})

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | (
            {} if self.reference is None else {"reference": dict(self.reference)}
        )

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if "reference" in state_dict:
            self.set_reference(state_dict["reference"])
