"""Make what is typed on a command line what Hydra's grammar takes. Torch-free."""

import os
import re

from armature.data.batching import FOLD_KEYS, LOADER_KEYS
from armature.project import FOLDERS


def quoted(argument: str) -> str:
    """Add the quotes that Hydra's grammar needs: around values with `=`, `é`, `'` or `(`, and names
    that it would take for numbers, as in `debug=nan` and `run.name=1.10`.

    `GROUP=null` becomes `GROUP=[]`: Hydra refuses null for a group. The `~` of a folder becomes the
    home.
    """
    key, equals, value = argument.partition("=")
    if key in _FOLDERS and value.startswith("~"):  # which a shell leaves as it is after `run.root=`
        value = os.path.expanduser(value)
        argument = f"{key}={value}"
    if value == "null" and any((folder / key).is_dir() for folder in FOLDERS):
        return f"{key}=[]"
    if argument.startswith("-") or _GRAMMAR.search(value):
        return argument
    odd = re.compile(f"{_ODD}|{_NUMBERS.get(key, _ODD)}", re.ASCII)
    parts = value.split(",")  # of a sweep
    return key + equals + ",".join(_quote(part) if odd.search(part) else part for part in parts)


_FOLDERS = ("run.root", "checkpoint.root", "resume")
_ODD = r"[^\w/\-\\+.$%*@?|:\s]"  # what Hydra takes in quotes only
_NUMBERS = {"debug": "^nan$", "run.name": r"^\d+[_.e]"}  # 7e12345, of a commit, would be infinity
# what is in Hydra's grammar already: quotes, lists, references and functions
_GRAMMAR = re.compile(r"""^['"\[{]|\$\{|^\w+\(.*\)$""", re.ASCII)


def _quote(value: str) -> str:
    escaped = value.replace("\\'", "\\\\'").replace("'", "\\'")
    return f"'{escaped}'"


def addable(argument: str) -> str:
    """Let a fold, and a loader key of a plain LightningDataModule, be typed: no configuration has
    it.
    """
    group, _, key = argument.partition("=")[0].partition(".")
    return f"++{argument}" if group == "data" and key in LOADER_KEYS + FOLD_KEYS else argument
