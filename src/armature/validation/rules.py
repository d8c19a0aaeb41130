"""Rules for a value: each returns what the value must be if it is not that, else None.

Torch-free.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

Rule = Callable[[Any], str | None]


def number(
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    whole: bool = False,
    null: str | None = None,
) -> Rule:
    """Return a rule for a number. `null` says what null stands for, if it is allowed."""
    both = least is not None and most is not None
    words_of = (
        ("from", "above", "to", "below")
        if both
        else ("of at least", "above", "of at most", "below")
    )
    bounds = zip((least, above, most, below), words_of, strict=True)
    given = [
        f"{word} {bound if isinstance(bound, int) else f'{bound:g}'}"
        for bound, word in bounds
        if bound is not None
    ]
    words = (" " if both else " and ").join(given)
    kind = f"must be a {'whole ' * whole}number {words}".rstrip()
    if (least, above, below) == (None, 0, None) or (least, most, whole) == (1, None, True):
        kind = "must be positive and finite" if not whole else "must be a positive whole number"
    kind += f", or null for {null}" if null else ""
    of_text = kind.replace("positive and finite", "a positive, finite number")

    def rule(value: Any) -> str | None:
        if value is None and null:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            return of_text
        if not math.isfinite(value):
            return kind
        good = not whole or isinstance(value, int)
        good = good and (least is None or value >= least) and (above is None or value > above)
        good = good and (most is None or value <= most) and (below is None or value < below)
        return None if good else kind

    return rule


def prompts(value: Any) -> str | None:
    texts = value if isinstance(value, list) and value else [value]
    if all(isinstance(text, str) and text.strip() for text in texts):
        return None
    return "must be text to continue, a list of texts, or auto for held-out text"


def three(*, above: float | None = None) -> Rule:
    """Return a rule for a number of each of the channels red, green and blue."""
    each, kind = (
        number(above=above),
        "three numbers" if above is None else f"three numbers above {above}",
    )

    def rule(value: Any) -> str | None:
        good = value is None or (
            isinstance(value, list) and len(value) == 3 and not any(map(each, value))
        )
        return (
            None
            if good
            else f"must be {kind}, of the channels red, green and blue, or null for ImageNet's"
        )

    return rule


def one_of(*names: str) -> Rule:
    return lambda value: None if value in names else f"must be one of {', '.join(names)}"


def text(what: str, *, null: str | None = None, form: str = r"(?s).*\S.*") -> Rule:
    def rule(value: Any) -> str | None:
        if (value is None and null) or (isinstance(value, str) and re.fullmatch(form, value)):
            return None
        return f"must be {what}" + (f", or null for {null}" if null else "")

    return rule


def metric(value: Any) -> str | None:
    """A name: OmegaConf makes a text of a number that was typed."""
    good = (
        isinstance(value, str)
        and value.strip()
        and value not in ("True", "False")
        and not _is_number(value)
    )
    return None if good else "must be the name of a metric, as in val/loss"


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def length(value: Any) -> str | None:
    """A number of steps, or a share of the run."""
    good = (type(value) is int and value >= 0) or (
        type(value) is float
        and math.isfinite(value)
        and value >= 0
        and (value < 1.0 or value == int(value))
    )
    return (
        None
        if good
        else "must be a whole number of optimizer steps from 0, or a share of the run below 1.0"
    )


def counts(value: Any) -> str | None:
    good = value is None or (
        isinstance(value, list) and value and all(type(n) is int and n > 0 for n in value)
    )
    return None if good else "must be numbers of blocks from 1, as in [5,6,5], or null"


def steps(value: Any) -> str | None:
    good = isinstance(value, list) and all(type(n) is int and n > 0 for n in value)
    return None if good else "must be a list of step numbers from 1, as in [7,12]"


def patterns(value: Any) -> str | None:
    good = value is None or (
        isinstance(value, list) and all(isinstance(each, str) and each for each in value)
    )
    return None if good else "must be a list of names or patterns, as in [q,v]"


def paths(value: Any) -> str | None:
    texts = value if isinstance(value, list) and value else [value]
    good = value is None or all(
        isinstance(text, str) and text and "\0" not in text for text in texts
    )
    return None if good else "must be a path, a pattern, or a list of them"


def named_paths(value: Any) -> str | None:
    good = (
        isinstance(value, dict)
        and value
        and all(each is not None and paths(each) is None for each in value.values())
    )
    return (
        None if good else "must be a path or a list of them for each name, as in {a: a/*.txt, b: b}"
    )


def files(value: Any) -> str | None:
    """Paths, also by the name of their split."""
    wrong = named_paths(value) if isinstance(value, dict) else paths(value)
    return (
        wrong
        and "must be a file, a pattern, a list of them, or these by split: {train: a.csv, test: "
        "b.csv}"
    )


def named_weights(value: Any) -> str | None:
    positive = number(above=0)
    good = value is None or (
        isinstance(value, dict) and value and not any(map(positive, value.values()))
    )
    return (
        None
        if good
        else "must be a number above 0 for each name, as in {a: 3, b: 1}, or null for all alike"
    )


def duration(value: Any) -> str | None:
    found = re.fullmatch(r"(\d{1,5}):(\d{2}):(\d{2}):(\d{2})", str(value))
    days, hours, minutes, seconds = map(int, found.groups()) if found else (0, 0, 0, 0)
    good = hours <= 23 and minutes <= 59 and seconds <= 59 and any((days, hours, minutes, seconds))
    return (
        None if good or value is None else "must be DD:HH:MM:SS, as in trainer.max_time=00:12:00:00"
    )


def checkpointing(value: Any) -> str | None:
    good = value in ("none", "every", "selective") or (type(value) is int and value >= 1)
    return None if good else "must be none, every, selective, or n for every n-th block"


def texts(value: Any) -> str | None:
    good = isinstance(value, list) and all(isinstance(each, str) and each.strip() for each in value)
    return None if good else "must be a list of words, as in [baseline,long]"


def packages(value: Any) -> str | None:
    good = (
        isinstance(value, list)
        and value
        and all(isinstance(name, str) and _is_dotted(name) for name in value)
    )
    return (
        None
        if good
        else "must be a list of packages, as in [armature,torch.nn,torch.optim,lightning.pytorch]"
    )


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))
