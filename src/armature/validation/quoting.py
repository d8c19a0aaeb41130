"""Make what is typed on a command line what Hydra's grammar takes. Torch-free."""

import os
import re

from armature.data.batching import FOLD_KEYS, LOADER_KEYS
from armature.project import FOLDERS


def quoted(argument: str) -> str:
    """Add the quotes that Hydra's grammar needs: around `nan` in `debug=nan`, and values with `=`,
    `é`, `'` or `(`.

    `GROUP=null` becomes `GROUP=[]`: Hydra refuses null for a group. The `~` of a folder becomes the
    home.
    """
    key, _, value = argument.partition("=")
    if key in _FOLDERS and value.startswith("~"):  # which a shell leaves as it is after `run.root=`
        value = os.path.expanduser(value)
        argument = f"{key}={value}"
    if value == "null" and any((folder / key).is_dir() for folder in FOLDERS):
        return f"{key}=[]"
    if argument == "debug=nan":
        return "debug='nan'"
    if argument.startswith("-") or value[:1] in ("'", '"', "[", "{") or "${" in value:
        return argument
    parts = value.split(",")  # of a sweep; the arguments of range(…) are no such parts
    if _FUNCTION.fullmatch(value) or not any(_ODD.search(part) for part in parts):
        return argument
    return f"{key}={','.join(_quote(part) if _ODD.search(part) else part for part in parts)}"


_FOLDERS = ("run.root", "checkpoint.root", "resume")
_ODD = re.compile(r"[^\w/\-\\+.$%*@?|:\s]", re.ASCII)  # what Hydra takes in quotes only
_FUNCTION = re.compile(r"\w+\(.*\)", re.ASCII)


def _quote(value: str) -> str:
    escaped = value.replace("\\'", "\\\\'").replace("'", "\\'")
    return f"'{escaped}'"


def addable(argument: str) -> str:
    """Let a fold, and a loader key of a plain LightningDataModule, be typed: no configuration has
    it.
    """
    group, _, key = argument.partition("=")[0].partition(".")
    return f"++{argument}" if group == "data" and key in LOADER_KEYS + FOLD_KEYS else argument
