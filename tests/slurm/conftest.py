import pytest

from benchmarks.faults import slurm_cluster


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """A running Slurm of two nodes."""
    if (reason := slurm_cluster.missing()) is not None:
        pytest.skip(reason)
    with slurm_cluster.start(tmp_path_factory.mktemp("slurm")) as started:
        yield started
