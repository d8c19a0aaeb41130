"""Run a script, or ask what train.py refuses, in the test's own process, which saves imports."""

import contextlib
import importlib.util
import sys
from types import ModuleType

from hydra.core.global_hydra import GlobalHydra

from armature import cli
from armature.errors import ConfigError
from armature.validation.checks import check
from tests.running import ROOT


def problems_of(*typed: str, prepare: bool = False) -> list[str]:
    """Return what train.py would say of a command line before it starts anything."""
    try:
        check(cli.compose(typed), prepare=prepare, overrides=typed)
    except ConfigError as error:
        return error.problems
    return []


def load(name: str) -> ModuleType:
    cli._composed.clear()  # by an earlier command of this process
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script: ModuleType, words: tuple[str, ...], monkeypatch, capsys) -> str:
    """Call the script's main with a command line, and return what it prints."""
    monkeypatch.setattr(sys, "argv", [str(script.__file__), *words])
    GlobalHydra.instance().clear()
    with contextlib.suppress(SystemExit):
        script.main()
    captured = capsys.readouterr()
    return captured.out + captured.err
