"""Runs that are broken in every listed way, under every strategy."""

import sys

import pytest

from benchmarks.faults import matrix, over_network, under_slurm
from benchmarks.faults.cells import COLUMNS, STEPS, Run, Session
from benchmarks.faults.matrix import cell, flip_byte

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


FAULTS = (*matrix.FAULTS, *under_slurm.FAULTS, *over_network.FAULTS)
BY_NAME = {fault.name: fault for fault in FAULTS}
GUARANTEED = (
    ("sigkill_rank", "ddp"),
    ("sigstop_rank", "ddp"),
    ("kill_in_save", "ddp"),
    ("full_disk", "single"),
    ("twice", "single"),
)
CELLS = [
    (fault.name, column.name)
    for fault in FAULTS
    for column in COLUMNS.values()
    if not column.stock and column.name not in fault.without
]


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    yield Session(tmp_path_factory.mktemp("faults"))
    under_slurm.SLURM.close()


@pytest.mark.parametrize(
    ("fault", "column"),
    [
        pytest.param(*each, marks=[pytest.mark.guarantee] if each in GUARANTEED else [])
        for each in CELLS
    ],
)
def test_a_disturbed_run_ends_like_an_undisturbed_one(fault, column, session):
    result = cell(BY_NAME[fault], COLUMNS[column], session)
    if result.text.startswith("–"):
        pytest.skip(result.text)
    assert result.ok, f"{result.text}\n{result.output[-6000:]}"


@pytest.fixture
def copy(session, request):
    """A copy of the undisturbed run, and that run."""
    reference = session.reference(COLUMNS["single"])
    copied = Run(session, COLUMNS["single"], request.node.name, copy_of=reference)
    assert copied.difference(reference) is None
    assert copied.half_checkpoints() == []
    return copied, reference


def test_other_weights_are_not_taken_for_equal(copy):
    run, reference = copy
    (run.checkpoints / "last").write_text(f"step={STEPS - 2:06d}\n")
    assert run.difference(reference) == "weights differ"


def test_other_metrics_are_not_taken_for_equal(copy):
    run, reference = copy
    with (run.directory / "metrics.csv").open("a") as file:
        file.write("\n")
    assert run.difference(reference) == "metrics.csv differs"


def test_what_a_crash_leaves_is_found(copy):
    run, _ = copy
    (run.checkpoints / "step=000099.part").mkdir()
    flip_byte(run.checkpoints / f"step={STEPS:06d}", stock=False)
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
