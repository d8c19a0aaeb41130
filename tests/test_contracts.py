"""The arrows between the packages, read from the imports themselves.

`make checks` runs this file too.
"""

import ast
import functools
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "armature"
TRAINING_CODE = ("models", "tasks", "data", "callbacks", "optim", "loggers")
DISTRIBUTED = (
    "parallel",
    "strategies",
    "checkpoint",
    "launcher",
    "training",
    "planning",
    "doctor",
    "worker.py",
)
ALL = sorted(SOURCE.rglob("*.py"))


def imports(file: Path) -> set[str]:
    """Dotted names of all that a file imports, at its top or anywhere inside."""
    return {name for names, _ in statements(file) for name in names}


@functools.cache
def statements(file: Path) -> list[tuple[set[str], bool]]:
    """The names of each import statement, and whether it runs when the file is imported."""
    found: list[tuple[set[str], bool]] = []

    def visit(node: ast.AST, runs: bool) -> None:
        if isinstance(node, ast.Import):
            found.append(({alias.name for alias in node.names}, runs))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.append(({f"{node.module}.{alias.name}" for alias in node.names}, runs))
        checks_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        inside = (
            runs
            and not checks_types
            and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        )
        for child in ast.iter_child_nodes(node):
            if isinstance(
                child, ast.stmt | ast.excepthandler | ast.match_case
            ):  # no expression holds an import
                visit(child, inside)

    visit(ast.parse(file.read_text()), True)
    return found


def files(*packages: str) -> list[Path]:
    found = [file for package in packages for file in (SOURCE / package).rglob("*.py")]
    assert found
    return found


def starting(names: set[str], *prefixes: str) -> set[str]:
    return {
        name
        for name in names
        for prefix in prefixes
        if name == prefix or name.startswith(f"{prefix}.")
    }


def relative(file: Path) -> str:
    return str(file.relative_to(SOURCE))


def found(walked: Iterable[Path], forbidden: Callable[[Path], set[str]]) -> dict[str, set[str]]:
    """What is forbidden, by the files that have it."""
    return {relative(file): names for file in walked if (names := forbidden(file))}


@pytest.mark.guarantee
def test_training_code_never_touches_a_process_group():
    outside = (
        "torch.distributed",
        "armature.parallel",
        "armature.strategies",
        "armature.launch",
        "armature.worker",
    )
    outside = (*outside, "armature.launcher", "armature.checkpoint")
    asked = {"armature.strategies.base.StrategyMixin"}  # by callbacks, for what it knows of ranks
    assert not found(files(*TRAINING_CODE), lambda file: starting(imports(file), *outside) - asked)


@pytest.mark.guarantee
def test_callbacks_never_reach_a_process_group_through_training():
    assert not found(
        files("callbacks"), lambda file: {name for name in imports(file) if "process_group" in name}
    )


def test_torch_distributed_is_imported_in_few_places():
    elsewhere = [file for file in ALL if file.relative_to(SOURCE).parts[0] not in DISTRIBUTED]
    assert not found(elsewhere, lambda file: starting(imports(file), "torch.distributed"))


@pytest.mark.guarantee
def test_models_are_plain_torch():
    def forbidden(file: Path) -> set[str]:
        ours = starting(imports(file), "armature") - starting(imports(file), "armature.models")
        return ours | starting(imports(file), "lightning", "hydra", "omegaconf")

    assert not found(files("models"), forbidden)


def test_no_import_goes_in_a_circle():
    modules = {
        ".".join(["armature", *file.relative_to(SOURCE).with_suffix("").parts]): file
        for file in ALL
    }
    modules = {name.removesuffix(".__init__"): file for name, file in modules.items()}
    graph = {
        name: {
            target
            for names, runs in statements(file)
            if runs
            for imported in names
            for target in (imported, imported.rpartition(".")[0])
            if target in modules and target != name
        }
        for name, file in modules.items()
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " → ".join([*path[path.index(name) :], name])
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_few_modules_lie_loose_at_the_top():
    loose = {file.name for file in SOURCE.glob("*.py")} - {"__init__.py"}
    assert len(loose) <= 11, loose


def test_a_violation_is_seen(tmp_path):
    (tmp_path / "task.py").write_text(
        "def f():\n    from torch import distributed as d\n    import torch.distributed\n"
    )
    assert starting(imports(tmp_path / "task.py"), "torch.distributed") == {"torch.distributed"}
