import os

import pytest

from tests import needs
from tests.support import slurm_cluster


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """A running Slurm of two nodes."""
    if os.geteuid() != 0:
        pytest.skip("starting a Slurm takes root")
    if (reason := slurm_cluster.missing()) is not None:
        needs.absent(reason)
    with slurm_cluster.start(tmp_path_factory.mktemp("slurm")) as started:
        yield started
