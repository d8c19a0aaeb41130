"""`--all-habits` runs every cell; without it a sample runs."""

from pathlib import Path

import pytest

from tests.forked import Forks
from tests.lightning_habits.runs import Runs


def pytest_addoption(parser):
    parser.addoption("--all-habits", action="store_true", help="run every habit under every layout")


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    modules = [
        f"tests.lightning_habits.{file.stem}"
        for file in sorted(Path(__file__).parent.glob("[!_]*.py"))
    ]
    imports = [module for module in modules if not module.endswith(("conftest", "test_habits"))]
    with Forks(tmp_path_factory.mktemp("habits"), imports) as forks:
        yield Runs(forks)
