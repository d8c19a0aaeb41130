"""One process, which has everything imported, starts all runs."""

import pytest

from tests.forked import Forks
from tests.lightning_habits.habits import FILES
from tests.lightning_habits.runs import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    modules = [file.__name__ for file in FILES]
    with Forks(tmp_path_factory.mktemp("habits"), modules) as forks:
        yield Runs(forks)
