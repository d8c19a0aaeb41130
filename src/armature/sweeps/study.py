"""Optuna's study of a sweep: where it is stored, and its samplers and pruners by name.

Imports optuna when called.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from armature.errors import ConfigError, error_line, hide

JOURNAL = "study.journal"
# packages that Optuna does not require, and imports only when one of these is used
NEEDED = {
    "CmaEsSampler": "cmaes",
    "GPSampler": "scipy",
    "QMCSampler": "scipy",
    "WilcoxonPruner": "scipy",
}
USUAL = {"sampler": "TPESampler", "pruner": "MedianPruner"}
_PASSWORD = re.compile(r"://[^/@]*:([^/@]+)@")


def load_optuna() -> Any:
    """Return the module optuna. ConfigError: it is not installed."""
    try:
        return importlib.import_module("optuna")
    except ImportError as error:
        raise ConfigError(
            f"sweep=optuna needs the package optuna ({error}). Type make setup EXTRAS=sweep, or "
            "pip install optuna."
        ) from error


def journal(folder: Path) -> str:
    """Return the file of a sweep's study."""
    return str(folder / JOURNAL)


def where(folder: Path) -> str | None:
    """Return the file of a sweep's study, or None if it has none: it is a grid, or its study is in
    a database.
    """
    return journal(folder) if (folder / JOURNAL).is_file() else None


def open_study(where: str, *, name: str, mode: str = "min", create: bool = True) -> Any:
    """Return the study in a journal file, or in a database that `where` names by a URL.

    Raises:
        ConfigError: a database that cannot be opened.
    """
    optuna = load_optuna()
    hide(_PASSWORD.findall(where))
    storages = optuna.storages
    try:
        file = storages.journal.JournalFileBackend
        storage = where if "://" in where else storages.JournalStorage(file(where))
        if not create:
            return optuna.load_study(study_name=name, storage=storage)
        return optuna.create_study(
            study_name=name, storage=storage, direction=f"{mode}imize", load_if_exists=True
        )
    except Exception as error:  # of any database's driver
        raise ConfigError(
            f"hydra.sweeper.storage={where}: {error_line(error)}. Type null for a file."
        ) from error


def plugin_of(kind: str, node: Mapping[str, Any]) -> Any:
    """Return the sampler or pruner that `name` and its arguments describe.

    ConfigError: there is none such.
    """
    load_optuna()
    module = importlib.import_module(f"optuna.{kind}s")
    known = [
        each
        for each in dir(module)
        if each.endswith(kind.capitalize()) and not each.startswith("Base")
    ]
    name, key = str(node.get("name")), f"hydra.sweeper.{kind}.name"
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise ConfigError(
            f"{key}={name}: optuna.{kind}s has no such class.{hint} Options: {', '.join(known)}."
        )
    package = NEEDED.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{key}={name} needs the package {package}. Type pip install {package}, or "
            f"{key}={USUAL[kind]}."
        )
    arguments = {each: value for each, value in node.items() if each != "name"}
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
