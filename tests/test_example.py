"""`experiment=example`: the model, plan, data and task that users copy learn, and no strategy
changes their losses.
"""

import ast
import sys
from pathlib import Path

import pytest

from tests import running

EXAMPLE = running.ROOT / "src" / "example"


def train(folder: Path, *overrides: str, ranks: int = 1) -> Path:
    fixed = [
        "experiment=example",
        "logger=none",
        "trainer.accelerator=cpu",
        "trainer.precision=32-true",
        "run.name=run",
        f"trainer.devices={ranks}",
    ]
    command = [sys.executable, str(running.ROOT / "train.py"), *fixed, *overrides]
    result = running.run(command, cwd=folder, env=running.environment(), ranks=ranks)
    assert result.returncode == 0, result.stderr[-6000:]
    assert "test/accuracy" in result.stdout + result.stderr
    return folder / "outputs" / "run"


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return train(tmp_path_factory.mktemp("single"))


@pytest.mark.slow
def test_it_learns(single):
    assert running.summary(single)["metrics"]["test/accuracy"] > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])  # ddp and tensor: tests/test_readme.py
def test_the_strategy_does_not_change_it(single, strategy, tmp_path):
    run_dir = train(tmp_path, f"strategy={strategy}", ranks=2)
    # later, the rounding of earlier steps adds up to more
    assert running.losses(run_dir)[:40] == pytest.approx(running.losses(single)[:40], rel=1e-5)
    assert running.summary(run_dir)["metrics"]["test/accuracy"] > 0.95


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
