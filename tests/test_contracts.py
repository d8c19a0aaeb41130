"""The arrows between the packages, read from the imports themselves. `make checks` runs this file too."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "armature"
TRAINING_CODE = ("models", "tasks", "data", "callbacks", "optim")


def imports(file: Path) -> set[str]:
    """Dotted names of all that a file imports, at its top or anywhere inside."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def files(*packages: str) -> list[Path]:
    found = [file for package in packages for file in (SOURCE / package).rglob("*.py")]
    assert found
    return found


def starting(names: set[str], *prefixes: str) -> set[str]:
    return {name for name in names for prefix in prefixes if name == prefix or name.startswith(f"{prefix}.")}


@pytest.mark.parametrize("file", files(*TRAINING_CODE), ids=lambda file: str(file.relative_to(SOURCE)))
def test_training_code_never_touches_a_process_group(file):
    assert not starting(imports(file), "torch.distributed", "armature.strategies", "armature.launch", "armature.worker")


@pytest.mark.parametrize("file", files("models"), ids=lambda file: str(file.relative_to(SOURCE)))
def test_models_are_plain_torch(file):
    ours = starting(imports(file), "armature") - starting(imports(file), "armature.models", "armature.models.plan")
    assert not ours
    assert not starting(imports(file), "lightning", "hydra", "omegaconf")


def test_a_violation_is_seen(tmp_path):
    (tmp_path / "task.py").write_text(
        "def f():\n    from torch import distributed as d\n    import torch.distributed\n"
    )
    assert starting(imports(tmp_path / "task.py"), "torch.distributed") == {"torch.distributed"}


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_files_stay_readable(file):
    assert len(file.read_text().splitlines()) <= 420
