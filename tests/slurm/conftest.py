import pytest

from tests.slurm import cluster


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """A running Slurm of two nodes."""
    if (reason := cluster.missing()) is not None:
        pytest.skip(reason)
    with cluster.start(tmp_path_factory.mktemp("slurm")) as started:
        yield started
