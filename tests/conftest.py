"""The option --all, the order of tests, a small corpus, and a cache that is not the user's."""

import gc
import importlib
from functools import partial

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--all",
        action="store_true",
        help="a test whose package is missing fails instead of being skipped",
    )


def pytest_configure(config):
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return  # it only waits for its workers, which start sooner if it imports nothing
    from hypothesis import settings

    from tests import needs, parsing

    parsing.remember()
    # of an example: a shared machine may stall for longer
    settings.register_profile("no deadline", deadline=None)
    settings.load_profile("no deadline")
    if config.getoption("--all"):
        needs.everything = True
        pytest.importorskip = lambda name, *_, **__: importlib.import_module(name)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    from tests import running

    return running.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def train(corpus, tmp_path):
    """Runs train.py on a tiny model, in an empty folder."""
    from tests import running

    return partial(running.train, cwd=tmp_path, corpus=corpus)


@pytest.fixture
def composed(corpus, monkeypatch, tmp_path):
    """Composes a checked configuration of a tiny run in an empty folder."""
    import armature
    from tests import running

    monkeypatch.chdir(tmp_path)
    return partial(armature.compose, *running.TINY, f"data.path={corpus}")


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    """Starts train.py in one folder for all tests of a file."""
    from tests.forked import Forks

    with Forks(tmp_path_factory.mktemp("runs")) as forks:
        yield forks


@pytest.fixture(scope="module")
def runs(forks):
    """Starts train.py on the modules of tests/plain_parts.py."""
    from tests.plain_runs import PlainRuns

    return PlainRuns(forks)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARMATURE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_collection_modifyitems(config, items):
    """Run files with slow tests first, so that no worker begins the longest file last."""
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish(session):
    gc.collect()
    gc.freeze()  # what is imported is no garbage of any test
