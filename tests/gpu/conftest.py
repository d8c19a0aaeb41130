"""What the tests on a GPU are compared with."""

import pytest

from tests import running
from tests.gpu.on_gpu import COMMON


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """Losses on a CPU, in fp32, in one process; and the corpus that they were made of."""
    folder = tmp_path_factory.mktemp("reference")
    source = running.write_corpus(folder / "corpus")
    running.train("run.name=cpu", *COMMON, cwd=folder, corpus=source)
    return running.losses(folder / "outputs" / "cpu"), source


@pytest.fixture(scope="session")
def adamw(reference, tmp_path_factory):
    """Losses on a CPU with AdamW, the optimizer under DeepSpeed."""
    folder = tmp_path_factory.mktemp("adamw")
    running.train("run.name=cpu", *COMMON, "optimizer=adamw", cwd=folder, corpus=reference[1])
    return running.losses(folder / "outputs" / "cpu")
