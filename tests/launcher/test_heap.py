"""A process that trains on a CPU keeps freed memory, unless its user has chosen how to allocate."""

import subprocess
import sys

import pytest

from armature.launcher import heap
from tests import running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
USERS = {
    "MALLOC_ARENA_MAX": "2",
    "GLIBC_TUNABLES": "glibc.malloc.check=0",
    "LD_PRELOAD": "libm.so.6",
}

ALLOCATE = """
import resource
from armature.launcher import heap
heap.keep_freed_memory({accelerator!r})
def step():
    for block in [bytearray(4 << 20) for _ in range(8)]:
        block[:: resource.getpagesize()] = block[:: resource.getpagesize()]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

COUNT_FAULTS = """
import itertools, resource, statistics
from pathlib import Path
from lightning.pytorch import Callback

class Count(Callback):
    counts = []
    def on_train_batch_end(self, *args):
        self.counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    def on_train_end(self, *args):
        # the median: a step that writes rows imports what does so, once, in a thread
        of_step = [after - before for before, after in itertools.pairwise(self.counts[-8:])]
        Path("faults").write_text(str(statistics.median(of_step)))
"""


@pytest.fixture
def unset(monkeypatch):
    for name in USERS:
        monkeypatch.delenv(name, raising=False)


def faults(accelerator: str = "cpu", **environ: str) -> int:
    """Return the page faults of 5 × 32 MiB in a new process, after keep_freed_memory."""
    code = ALLOCATE.format(accelerator=accelerator)
    environ = running.environment(PYTHONPATH=str(running.ROOT / "src"), **environ)
    return int(subprocess.check_output([sys.executable, "-c", code], env=environ))


@pytest.mark.parametrize(
    "environ", [{}, {"GLIBC_TUNABLES": heap.HUGE_PAGES}], ids=["alone", "as a rank"]
)
def test_memory_in_use_again_causes_no_page_fault(unset, environ):
    assert faults(**environ) < 100


@pytest.mark.parametrize(("name", "value"), USERS.items())
def test_a_users_choice_of_allocation_stays(unset, name, value, monkeypatch):
    assert faults(**{name: value}) > 10_000
    monkeypatch.setenv(name, value)
    assert heap.rank_variables("cpu") == {}


def test_only_processes_that_train_on_a_cpu_keep_memory(unset):
    assert faults("gpu") > 10_000
    assert heap.rank_variables("gpu") == {}
    assert heap.rank_variables("cpu") == {"GLIBC_TUNABLES": heap.HUGE_PAGES}


@pytest.mark.slow
def test_a_step_of_training_causes_no_page_faults(unset, corpus, tmp_path):
    (tmp_path / "counting.py").write_text(COUNT_FAULTS)
    running.train(
        "+callbacks.count._target_=counting.Count",
        "launch.allowed_packages=[armature,torch.optim,counting]",
        "model.width=128",
        "data.context=128",
        "trainer.max_steps=12",
        "trainer.val_every_n_steps=null",
        "trainer.test_at_end=false",
        "run.name=a",
        cwd=tmp_path,
        corpus=corpus,
        PYTHONPATH=str(tmp_path),
    )
    assert float((tmp_path / "faults").read_text()) <= 50  # with glibc's default heap: 528
