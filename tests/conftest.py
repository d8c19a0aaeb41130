"""What runs of the command line share: a small corpus, and a cache that is not the user's."""

import pytest
from hypothesis import settings

from tests import running

settings.register_profile("no deadline", deadline=None)  # of an example: a shared machine may stall for longer
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return running.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARMATURE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
