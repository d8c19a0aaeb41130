"""Run a script, or ask what train.py refuses, in the test's own process, which saves imports."""

import importlib.util
import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from types import ModuleType
from unittest import mock

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


def call(script: ModuleType | str, *words: object) -> tuple[int, str]:
    """Call the main of a script, or of scripts/NAME.py, with a command line; return its exit code
    and what it prints.
    """
    script = load(script) if isinstance(script, str) else script
    argv, shown, code = [str(script.__file__), *map(str, words)], io.StringIO(), 0
    GlobalHydra.instance().clear()
    with mock.patch.object(sys, "argv", argv), redirect_stdout(shown), redirect_stderr(shown):
        try:
            script.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, shown.getvalue()
