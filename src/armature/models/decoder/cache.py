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

    Attributes:
        newest_only: whether the model returns the newest position's logits alone (B, 1, V).
    """

    newest_only = False

    def __init__(self, *, positions: int | None = None) -> None:
        self.positions = positions
        self.length = 0
        self.layers: dict[str, tuple[Tensor, ...]] = {}  # keys and values (B, G, C, K)
        # each position's document number, if attention stays within documents
        self.documents_BS: Tensor | None = None
        # the position in the first place of a layer's room, 0 without a window
        self._first: dict[str, int] = {}
        self._rotary_C2K: Tensor | None = None

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
        return self._rotary_C2K[self.length :]

    def advance(self, x_BTD: Tensor) -> Tensor:
        """Count the positions of an input that all layers have read, and return those whose logits
        are wanted.
        """
        self.length += x_BTD.shape[1]
        return x_BTD[:, -1:] if self.newest_only else x_BTD

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
