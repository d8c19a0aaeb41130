"""Optuna's study of a sweep: where it is stored, and its samplers and pruners by name.

Imports optuna when called.
"""

import difflib
import importlib
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from armature.errors import ConfigError, error_line

JOURNAL = "study.journal"


def load_optuna() -> Any:
    """Return the module optuna. ConfigError: it is not installed."""
    try:
        return importlib.import_module("optuna")
    except ImportError as error:
        raise ConfigError(
            f"sweep=optuna needs the package optuna ({error}). Type make setup EXTRAS=sweep, or "
            "pip install optuna."
        ) from error


def open_study(folder: Path, *, mode: str | None = None) -> Any:
    """Return the study of a sweep's directory; with `mode` for writing, and made if there is none.

    Then a line that a full disk or a power cut has left unfinished is removed: the next one would
    be joined to it, and Optuna could never read the study again.
    """
    optuna, file = load_optuna(), str(folder / JOURNAL)
    journal = optuna.storages.journal
    storage = journal.JournalStorage(journal.JournalFileBackend(file))
    if mode:
        lock = journal.JournalFileSymlinkLock(file)
        lock.acquire()
        os.truncate(file, Path(file).read_bytes().rfind(b"\n") + 1)
        lock.release()
    # the folder's name when it was begun, which may be another now
    name = next(iter(optuna.get_all_study_names(storage)), folder.name)
    if not mode:
        return optuna.load_study(study_name=name, storage=storage)
    return optuna.create_study(
        study_name=name, storage=storage, direction=f"{mode}imize", load_if_exists=True
    )


def plugin_of(kind: str, node: Mapping[str, Any]) -> Any:
    """Return the sampler or pruner that `name` and its arguments describe.

    ConfigError: there is none such.
    """
    module = importlib.import_module(f"optuna.{kind}s")
    known = [
        each
        for each in module.__all__
        if each.endswith(kind.capitalize()) and not each.startswith("Base")
    ]
    arguments = {**node}
    name = str(arguments.pop("name", None))
    if name not in known:
        near = difflib.get_close_matches(name, known, 1, 0.4)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise ConfigError(
            f"hydra.sweeper.{kind}.name={name}: optuna.{kind}s has no such class.{hint} "
            f"Options: {', '.join(known)}."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that some arguments are experimental
            return getattr(module, name)(**arguments)
    except Exception as error:
        typed = ", ".join(f"{each}={value}" for each, value in arguments.items())
        raise ConfigError(
            f"hydra.sweeper.{kind}: {name} does not take {typed}: {error_line(error).rstrip('.')}. "
            f"Type hydra.sweeper.{kind}.ARGUMENT=… with another value."
        ) from error
