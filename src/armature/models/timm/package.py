"""Imports timm, also where torchvision is missing, which it declares and its models do not use.

`timm.models` imports `timm.data` for a few constants, and that imports torchvision for transforms
of images. Without torchvision, names that say what they stand for take its place while timm is
imported, and are gone afterwards.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from typing_extensions import override

ABSENT = "torchvision"


def load() -> Any:
    """Return timm.

    Raises ValueError if it is not installed, or needs more of torchvision than its name.
    """
    if "timm" in sys.modules:
        return sys.modules["timm"]
    if importlib.util.find_spec("timm") is None:
        raise ValueError("timm is not installed. Type make setup EXTRAS=timm")
    if importlib.util.find_spec(ABSENT) is not None:
        return importlib.import_module("timm")
    finder = _StandIns()
    sys.meta_path.append(finder)
    try:
        return importlib.import_module("timm")
    except Exception as error:  # whatever a newer version does with a stand-in
        for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
            del sys.modules[name]
        raise ValueError(
            f"this timm cannot be imported without torchvision ({type(error).__name__}: {error}). "
            "Install the torchvision that belongs to your torch, or make setup EXTRAS=timm"
        ) from error
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == ABSENT]:
            del sys.modules[name]


class _Named(type):
    """A class whose attributes are classes of the same kind: members of an enumeration, or
    bases.
    """

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(f"{cls.__name__}.{name}", (), {})

    @override
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__ == __name__:
            raise ImportError(f"{cls.__name__} needs torchvision, which is not installed.")
        return super().__call__(*args, **kwargs)


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(f"{self.__name__}.{name}", (), {})


class _StandIns(MetaPathFinder, Loader):
    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any:
        return (
            ModuleSpec(fullname, self, is_package=True)
            if fullname.partition(".")[0] == ABSENT
            else None
        )

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    @override
    def exec_module(self, module: ModuleType) -> None:
        pass
