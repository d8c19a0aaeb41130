"""Runs that are broken in every listed way, under every strategy."""

import shutil
import sys

import pytest

from tests.support.faults.faults import BY_NAME, strike
from tests.support.faults.runs import RANKS, STEPS, Run, Session

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

GUARANTEED = (
    ("sigkill_rank", "ddp"),
    ("sigstop_rank", "ddp"),
    ("kill_in_save", "ddp"),
    ("full_disk", "single"),
    ("twice", "single"),
)
CASES = [(f, s) for f in BY_NAME for s in RANKS if (f, s) != ("network_cut", "single")]


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    made = Session(tmp_path_factory.mktemp("faults"))
    with made.stack:
        yield made


@pytest.mark.parametrize(
    ("fault", "strategy"),
    [
        pytest.param(*each, marks=[pytest.mark.guarantee] if each in GUARANTEED else [])
        for each in CASES
    ],
)
def test_a_disturbed_run_ends_like_an_undisturbed_one(fault, strategy, session):
    run = Run(session, strategy, f"{fault} {strategy}")
    problems = strike(BY_NAME[fault], run)
    assert not problems, f"{problems}\n{run.output()[-6000:]}"


@pytest.fixture
def copy(session, request):
    """A copy of the undisturbed run, and that run."""
    reference = session.reference("single")
    copied = Run(session, "single", request.node.name)
    shutil.copytree(reference.folder, copied.folder, dirs_exist_ok=True)
    assert copied.difference(reference) is None
    assert copied.half_checkpoints() == []
    return copied, reference


def test_what_a_crash_leaves_is_found(copy):
    run, _ = copy
    (run.checkpoints / "step=000099.part").mkdir()
    (run.checkpoints / f"step={STEPS:06d}" / "__0_0.distcp").write_bytes(b"cut")
    assert [found.partition(":")[0] for found in run.half_checkpoints()] == [
        "step=000099.part",
        f"step={STEPS:06d}",
    ]


def test_a_process_that_is_left_is_found(copy):
    run, _ = copy
    run.start([sys.executable, "-c", "import time; time.sleep(60)"])
    assert len(run.orphans()) == 1
    run.kill()
    assert run.orphans() == []
