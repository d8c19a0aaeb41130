"""What runs of the command line share, a small corpus and a cache that is not the user's; which
tests run side by side.

`make test` has two workers (pytest-xdist). One begins with the tests that measure seconds, or need
the machine's cores for processes of their own. The other meanwhile takes whole files of the rest,
at a low priority; those with ranks last.
"""

import gc
import os

import pytest

TIMED = (
    "tests/callbacks/test_monitors.py",
    "tests/doctor/",
    "tests/faults/",
    "tests/gpu/",
    "tests/launcher/",
    "tests/multinode/",
    "tests/slurm/",
    "tests/test_benchmark.py",
    "tests/test_launch.py",
    "tests/test_restarts.py",
)
WITH_RANKS = (
    "tests/lightning_habits/",
    "tests/parallel/",
    "tests/strategies/",
    "tests/test_volume.py",
)
SHARING = ("tests/simulation/",)  # files that share a server
NICENESS = 10


def pytest_configure(config):
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return  # it only waits for its workers, which start sooner if it imports nothing
    from hypothesis import settings

    from tests import parsing

    parsing.remember()
    settings.register_profile(
        "no deadline", deadline=None
    )  # of an example: a shared machine may stall for longer
    settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    from tests import running

    return running.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARMATURE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):  # one of several workers
        slow = {item.path for item in items if item.get_closest_marker("slow")}

        def turn(item):
            name = item.nodeid
            return not name.startswith(TIMED), name.startswith(WITH_RANKS), item.path in slow

        items.sort(key=turn)


def pytest_collection_finish(session):
    gc.collect()
    gc.freeze()  # what is imported is no garbage of any test


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if (
        hasattr(item.config, "workerinput")
        and not item.nodeid.startswith(TIMED)
        and os.nice(0) < NICENESS
    ):
        os.nice(NICENESS)  # for good: no timed test is left for this worker


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.option.dist != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            if nodeid.startswith(TIMED):
                return "timed"
            return next(
                (folder for folder in SHARING if nodeid.startswith(folder)),
                nodeid.partition("::")[0],
            )

    config.option.loadscopereorder = False
    return Scheduling(config, log)
