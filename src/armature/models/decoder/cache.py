"""What generation keeps of the positions so far.

Shapes: B batch, T positions, S positions so far, D width, G key-value heads, K head width, C places
of the cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values of all positions so far, so that generation computes each of them once.

    Room for `positions` positions, the model's context if None, is taken once and written in place.
    With `lengths_B` the first input's rows count up to these lengths. Once read they are moved to
    the right, so that they end together: later inputs of one position continue each row at its own
    place.

    Attributes:
        newest_only: whether the model returns the logits of each row's newest position alone (B, 1,
            V).
        lengths_B: lengths of rows that do not end together yet; None once they do.
    """

    newest_only = False

    def __init__(self, *, positions: int | None = None, lengths_B: Tensor | None = None) -> None:
        self.positions = positions
        self.length = 0
        self.layers: dict[str, tuple[Tensor, ...]] = {}  # keys and values (B, G, C, K)
        # each position's document number, if attention stays within documents
        self.documents_BS: Tensor | None = None
        # the position in the first place of a layer's room, 0 without a window
        self._first: dict[str, int] = {}
        self._rotary_C2K: Tensor | None = None
        self.lengths_B = lengths_B
        self._padding_B: Tensor | None = None  # places before each row, once they do

    def clear(self) -> None:
        """Forget all positions, and keep the room."""
        self.length, self.documents_BS = 0, None
        self._first.clear()

    def rotary(self, table: Callable[[], Tensor]) -> Tensor:
        """Return the rows of the rotary table from the next position on.

        The table is computed once.
        """
        if self._rotary_C2K is None:
            self._rotary_C2K = table()
        if self._padding_B is None:
            return self._rotary_C2K[self.length :]
        # (B, 1, 1, 2, K/2): one position
        return self._rotary_C2K[self.length - self._padding_B[:, None, None]]

    def advance(self, x_BTD: Tensor) -> Tensor:
        """Count the positions of an input that all layers have read, and return those whose logits
        are wanted.
        """
        self.length += x_BTD.shape[1]
        if self.lengths_B is None:
            return x_BTD[:, -1:] if self.newest_only else x_BTD
        lengths_B, self.lengths_B = self.lengths_B, None
        self._end_together(lengths_B)
        return x_BTD[torch.arange(len(x_BTD), device=x_BTD.device), lengths_B - 1][:, None]

    def _end_together(self, lengths_B: Tensor) -> None:
        """Move each row to the right.

        What is left of it is document -1, which nothing else sees.
        """
        self._padding_B = self.length - lengths_B
        if self.documents_BS is None:
            self.documents_BS = torch.zeros(
                len(lengths_B), self.length, dtype=torch.int32, device=lengths_B.device
            )
        for row, padding in enumerate(self._padding_B.tolist()):
            for kept in (tensor for layer in self.layers.values() for tensor in layer):
                kept[row, :, padding : self.length] = kept[row, :, : self.length - padding].clone()
            self.documents_BS[row, padding:] = self.documents_BS[
                row, : self.length - padding
            ].clone()
            self.documents_BS[row, :padding] = -1

    def extend(
        self, name: str, k_BGTK: Tensor, v_BGTK: Tensor, *, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Append one layer's new keys and values, and return all that the new positions see.

        With a window there is room for about two windows. When it is full, what is still in reach
        moves to its front.
        """
        batch, groups, new, head_dim = k_BGTK.shape
        kept, first = self.layers.get(name), self._first.get(name, 0)
        oldest = 0 if window is None else max(0, self.length - window + 1)
        end = self.length - first + new
        if kept is None or end > kept[0].shape[2]:
            assert self._rotary_C2K is not None
            reach = 0 if kept is None else self.length - oldest
            positions = self.positions or self._rotary_C2K.shape[0]
            places = positions if window is None else min(positions, max(2 * window, reach + new))
            shape = batch, groups, places, head_dim
            room = tuple(
                torch.empty(shape, dtype=v_BGTK.dtype, device=v_BGTK.device) for _ in range(2)
            )
            if kept is not None:
                for to, old in zip(room, kept, strict=True):
                    to[:, :, :reach] = old[:, :, oldest - first : self.length - first]
                first = self._first[name] = oldest
            kept, end = room, self.length - first + new
            self.layers[name] = kept
        for all_BGCK, new_BGTK in zip(kept, (k_BGTK, v_BGTK), strict=True):
            all_BGCK.narrow(2, end - new, new).copy_(new_BGTK)
        k_BGSK, v_BGSK = (
            all_BGCK.narrow(2, oldest - first, end - oldest + first) for all_BGCK in kept
        )
        return k_BGSK, v_BGSK
