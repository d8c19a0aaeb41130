"""Which files of configs/ are the library's, in a clone to which users have added their own."""

import re
from pathlib import Path

LINE = "# yaml-language-server: $schema="
OWN = re.compile(r"_target_: (?!armature|example|lightning|torch)")  # a class of a user's package


def is_shipped(path: Path) -> bool:
    """Return whether a file names its schema and no class of another package."""
    text = path.read_text()
    return LINE in text and not OWN.search(text)
