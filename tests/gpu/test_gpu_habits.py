"""Modules as users of Lightning write them, on a GPU: the losses of a CPU, and an exact resume."""

import dataclasses

import pytest

from armature.proof import compare
from tests.forked import Forks
from tests.gpu.on_gpu import ACCELERATOR, needs
from tests.lightning_habits.compare import differences
from tests.lightning_habits.habits import HABITS
from tests.lightning_habits.runs import Runs

pytestmark = [pytest.mark.gpu, pytest.mark.slow, needs(1)]
CHAOTIC = ("LBFGS",)  # its line search turns the last digits of a loss into other steps
GPU = (f"trainer.accelerator={ACCELERATOR}", "trainer.matmul_precision=highest")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with Forks(tmp_path_factory.mktemp("habits")) as forks:
        yield Runs(forks)


@pytest.mark.parametrize("habit", HABITS, ids=lambda each: each.name)
def test_a_gpu_trains_and_resumes_as_a_cpu_does(runs, habit, monkeypatch):
    on_gpu = dataclasses.replace(
        habit, name=f"{habit.name}-gpu", overrides=(*habit.overrides, *GPU)
    )
    run, resumed = runs.straight(on_gpu, "single"), runs.resumed(on_gpu, "single")
    monkeypatch.setattr(compare, "BOUND", 1e-4)
    assert not differences(resumed, run, apart=habit.apart)
    if not habit.random and habit.name not in CHAOTIC:
        cpu = runs.straight(habit, "single")
        monkeypatch.setattr(compare, "BOUND", 1e-3)
        monkeypatch.setattr(compare, "NORM_BOUND", 1e-3)
        assert not differences(run, cpu, apart=habit.apart)
