"""What generation keeps of the positions so far.

Shapes: B batch, T positions, S positions so far, D width, G key-value heads, K head width, C places
of the cache.
"""

from collections.abc import Callable

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
        self._rotary_C2K: Tensor | None = None

    def clear(self) -> None:
        """Forget all positions, and keep the room."""
        self.length, self.documents_BS = 0, None

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
        """Append one layer's new keys and values, and return all that the new positions see."""
        batch, groups, new, head_dim = k_BGTK.shape
        if name not in self.layers:
            assert self._rotary_C2K is not None
            shape = batch, groups, self.positions or self._rotary_C2K.shape[0], head_dim
            self.layers[name] = (v_BGTK.new_empty(shape), v_BGTK.new_empty(shape))
        oldest = 0 if window is None else max(0, self.length - window + 1)
        kept = self.layers[name]
        for all_BGCK, new_BGTK in zip(kept, (k_BGTK, v_BGTK), strict=True):
            all_BGCK.narrow(2, self.length, new).copy_(new_BGTK)
        k_BGSK, v_BGSK = (all_BGCK[:, :, oldest : self.length + new] for all_BGCK in kept)
        return k_BGSK, v_BGSK
