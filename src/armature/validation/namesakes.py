"""Let `import pytorch_lightning` in users' code give `lightning.pytorch`, whose classes train here.

Both packages hold the same code, but not the same classes: a Trainer takes no LightningModule of
the other package.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from typing_extensions import override

TWINS = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def twin_of(name: str) -> str | None:
    """Return the name that a module of one of the packages, or something in it, has in the package
    `lightning`.
    """
    package, dot, rest = name.partition(".")
    return f"{TWINS[package]}{dot}{rest}" if package in TWINS else None


class _Twins(MetaPathFinder, Loader):
    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        twin = twin_of(fullname)
        found = None if twin is None else importlib.util.find_spec(twin)
        if found is None:
            return None
        spec = ModuleSpec(fullname, self, origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(str(twin_of(spec.name)))
        spec.loader_state = module.__spec__
        return module

    @override
    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # Python has just set the other one


def install() -> None:
    """Let imports of the other packages find the package `lightning`, unless they were imported
    already.
    """
    if not any(isinstance(finder, _Twins) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Twins())
