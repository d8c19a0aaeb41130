"""`experiment=example`: the model, plan, data and task that users copy learn.

tests/guarantees/test_same_result.py compares its losses under every strategy.
"""

import ast

import pytest

from tests import running

EXAMPLE = running.ROOT / "src" / "example"


@pytest.mark.slow
def test_it_learns(tmp_path):
    fixed = ("experiment=example", "logger=none", "trainer.accelerator=cpu", "run.name=run")
    result = running.call("train.py", *fixed, cwd=tmp_path)
    assert "test/accuracy" in result.stdout + result.stderr
    summary = running.summary(tmp_path / "outputs" / "run")
    assert summary["metrics"]["test/accuracy"] > 0.95


@pytest.mark.guarantee
@pytest.mark.parametrize("file", sorted(EXAMPLE.glob("*.py")), ids=lambda file: file.stem)
def test_it_never_touches_a_process_group(file):
    names = {
        name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
    }
    forbidden = ("torch.distributed", "armature.parallel", "armature.strategies")
    assert not [name for name in names if name.startswith(forbidden)]
