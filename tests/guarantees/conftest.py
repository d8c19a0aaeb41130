import pytest

from tests.forked import Forks
from tests.guarantees.runs import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarantees")
    with Forks(folder, ["tests.guarantees.users", "example.task", "example.data"]) as forks:
        yield Runs(forks)
