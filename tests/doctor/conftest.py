import contextlib

import pytest

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
    from hydra import compose

    from armature import config
    from armature.validation.checks import check
    from armature.validation.composing import composing

    folder = tmp_path_factory.mktemp("doctor")
    corpus = running.write_corpus(folder / "corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARMATURE_CACHE", str(folder / "cache"))
        config.register()
        with composing():
            overrides = [
                *running.TINY,
                f"data.path={corpus}",
                strategy,
                "trainer.devices=2",
                f"run.root={folder}/out",
            ]
            checked = check(compose("train", overrides=overrides))
        yield checked  # with Hydra closed, which other tests open
