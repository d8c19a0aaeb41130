import contextlib

import pytest

import armature
from tests import running


@pytest.fixture(scope="session")
def cfg(tmp_path_factory):
    """The checked configuration of a tiny run on two ranks."""
    with _checked(tmp_path_factory, "strategy=ddp") as checked:
        yield checked


@pytest.fixture(scope="session")
def tensor_cfg(tmp_path_factory):
    """The same, with two ranks that train on the same samples."""
    with _checked(tmp_path_factory, "strategy=tensor") as checked:
        yield checked


@contextlib.contextmanager
def _checked(tmp_path_factory, strategy):
    folder = tmp_path_factory.mktemp("doctor")
    corpus = running.write_corpus(folder / "corpus")
    words = (f"data.path={corpus}", strategy, "trainer.devices=2", f"run.root={folder}/out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARMATURE_CACHE", str(folder / "cache"))
        yield armature.compose(*running.TINY, *words)
