"""What is said of a checkpoint whose weights do not fit a model. Torch-free."""

import re
from collections.abc import Sequence
from pathlib import Path

_OTHER_SIZE = re.compile(
    r"size mismatch for (\S+): .*?torch\.Size\(\[(.*?)\]\).*?torch\.Size\(\[(.*?)\]\)"
)


def another_model(source: Path, missing: Sequence[str], surplus: Sequence[str]) -> str:
    return (
        f"{source} holds another model's weights. "
        f"Not in the checkpoint: {few(missing)}. Not in the model: {few(surplus)}."
    )


def other_sizes(source: Path, wrong: Sequence[str]) -> str:
    return (
        f"{source} holds weights of other sizes: {few(wrong)}. Give the model the sizes that "
        "it was trained with."
    )


def of_load_state_dict(source: Path, error: RuntimeError) -> str:
    """Return torch's report of many lines, one per weight of another size, as one."""
    wrong = [
        f"{name} is ({there}) there and ({here}) here"
        for name, there, here in _OTHER_SIZE.findall(str(error))
    ]
    return other_sizes(source, wrong) if wrong else f"{source} does not fit the model. {error}"


def few(names: Sequence[str], *, limit: int = 5) -> str:
    shown = ", ".join(names[:limit]) or "nothing"
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
