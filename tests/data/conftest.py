"""Run a script of ours in the test's own process."""

import contextlib
import importlib.util
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch, capsys):
    def run(name: str, *words: str) -> str:
        spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / "scripts" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        GlobalHydra.instance().clear()
        with contextlib.suppress(SystemExit):
            module.main()
        captured = capsys.readouterr()
        return captured.out + captured.err

    return run
