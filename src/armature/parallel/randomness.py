"""The random state of one rank: Python's, NumPy's, torch's, and that of its GPU."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch

from armature.parallel import process_group


def capture() -> dict[str, Any]:
    """Return everything that the next draw depends on, as tensors and plain values."""
    version, words, gauss = random.getstate()
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state())
    state: dict[str, Any] = {
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Continue to draw from what `capture` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    elif torch.cuda.is_available():
        # of a CPU: else all ranks would draw the GPU's numbers of the set-up
        torch.cuda.manual_seed(torch.initial_seed())


OF_ALL_RANKS = -1  # a stream that no rank trains with


def begin(*, seed: int, stream: int, step: int = 0) -> None:
    """Seed streams that differ between ranks with different data, and from what was drawn before
    `step`.
    """
    torch.manual_seed(seed * 1_000_003 + stream + step * 7_919)
    random.seed(f"{seed}/{stream}/{step}")
    np.random.seed((seed * 1_000_003 + stream + step * 7_919) % 2**32)


@contextmanager
def own_draws(place: int) -> Iterator[None]:
    """Let ranks that draw the same numbers draw others from torch inside the context, each by its
    `place`.

    Code outside of a model, such as a random mask of the inputs, must draw the same on ranks that
    share samples. Inside of it they must not: dropout of different positions is independent.
    """
    seed = random.getrandbits(60)  # leaves torch's streams as they are without this
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    with torch.random.fork_rng([torch.cuda.current_device()] if on_gpu else []):
        torch.manual_seed(seed + place)
        yield


def of_this_rank(saved: dict[str, Any] | None, layout: str) -> dict[str, Any] | None:
    """Return this rank's random state among those that all ranks have saved, or None: under another
    layout ranks draw other numbers anyway.
    """
    if saved is None or saved["layout"] != layout or len(saved["ranks"]) != process_group.ranks():
        return None
    return saved["ranks"][process_group.rank()]


class RankRandomState:
    """A random state of this rank that is held until `restore`: what is drawn until then has no
    later effect.
    """

    def __init__(self) -> None:
        self._held: dict[str, Any] | None = None
        self._begins = False  # whether the first batch, which is to come, restores it

    def begin(self, *, seed: int, stream: int) -> None:
        """Begin this rank's stream with the first batch, unless a checkpoint's state is held."""
        begin(seed=seed, stream=stream)
        if self._held is None:
            self.hold()
        self._begins = True

    def hold(self) -> None:
        self._held = capture()

    def restore(self) -> None:
        if self._held is not None:
            restore(self._held)
            self._held, self._begins = None, False

    def current(self) -> dict[str, Any]:
        """Return this rank's state for a checkpoint: before the first batch, the one held."""
        return self._held if self._begins and self._held is not None else capture()

    def load(
        self, saved: dict[str, Any] | None, *, layout: str, seed: int, stream: int, step: int
    ) -> None:
        """Hold this rank's state from a checkpoint, or else begin a new stream at its step."""
        self._held = of_this_rank(saved, layout)
        if self._held is None:
            begin(seed=seed, stream=stream, step=step)
            self.hold()
