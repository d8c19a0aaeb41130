import pytest

from tests import running
from tests.slurm import cluster


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """A running Slurm of two nodes."""
    if (reason := cluster.missing()) is not None:
        pytest.skip(reason)
    with cluster.start(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return running.write_corpus(tmp_path_factory.mktemp("corpus"))
