"""The random state of one rank: Python's, NumPy's, torch's, and that of its GPU."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """Everything that the next draw depends on, as tensors and plain values."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = cast(tuple[str, Any, int, int, float], np.random.get_state(legacy=True))
    state: dict[str, Any] = {
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "numpy": (str(name), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Go on drawing where `capture` was."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def begin(*, seed: int, stream: int, step: int = 0) -> None:
    """Streams that ranks with different data do not share, and that do not repeat what was drawn before `step`."""
    torch.manual_seed(seed * 1_000_003 + stream + step * 7_919)
    random.seed(f"{seed}/{stream}/{step}")
    np.random.seed((seed * 1_000_003 + stream + step * 7_919) % 2**32)
