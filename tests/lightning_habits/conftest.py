"""`--all-habits` runs every cell; without it a sample runs."""

import pytest

from tests.forked import Forks
from tests.lightning_habits.runs import Runs


def pytest_addoption(parser):
    parser.addoption("--all-habits", action="store_true", help="run every habit under every layout")


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    with Forks(tmp_path_factory.mktemp("habits")) as forks:
        yield Runs(forks)
