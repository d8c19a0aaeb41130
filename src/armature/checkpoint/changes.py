"""Which settings of an object's state a user has changed between two starts of a run.

A checkpoint holds the state of optimizers, schedules and callbacks, and with it their settings: a
rate, a decay, a patience. It also holds what the state was when the objects had just been built.
What is built otherwise at a resume has been changed, on the command line or in code, and counts;
all else is as training left it.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def merge(saved: Any, *, then: Any, now: Any, keep: Collection[str] = ()) -> Any:
    """Return a saved state with the values of `now`, as built for this start, that differ from
    `then`, as built for the start that saved it.

    Args:
        keep: keys whose saved values stay.
    """
    states = (saved, then, now)
    if all(isinstance(each, Mapping) for each in states):
        return {
            key: merge(value, then=then[key], now=now[key], keep=keep)
            if key in then and key in now and key not in keep
            else value
            for key, value in saved.items()
        }
    if all(type(each) is list and len(each) == len(saved) for each in states):
        pairs = zip(*states, strict=True)
        return [merge(value, then=old, now=new, keep=keep) for value, old, new in pairs]
    return saved if same(then, now) else now


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and torch.equal(one.cpu(), other.cpu())
    return repr(one) == repr(other) or bool(np.all(one == other))
