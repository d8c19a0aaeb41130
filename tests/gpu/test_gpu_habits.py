"""Modules as users of Lightning write them, on a GPU: the losses of a CPU, and a resume inside an
epoch.
"""

import dataclasses

import pytest

from tests.forked import Forks
from tests.gpu.on_gpu import ACCELERATOR, needs
from tests.lightning_habits.habits import HABITS
from tests.lightning_habits.runs import Runs, differences
from tests.lightning_habits.test_habits import straight

pytestmark = [pytest.mark.gpu, pytest.mark.slow, needs(1)]
CHAOTIC = ("lbfgs",)  # its line search turns the last digits of a loss into other steps
DRAW_ON_THE_DEVICE = (
    "seeds_validation",
    "drawn_at_train_start",
)  # whose generator gives other numbers than a CPU's
GPU = (f"trainer.accelerator={ACCELERATOR}", "trainer.matmul_precision=highest")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with Forks(tmp_path_factory.mktemp("habits")) as forks:
        yield Runs(forks)


@pytest.mark.parametrize(
    "habit", [each for each in HABITS if "single" in each.layouts], ids=lambda each: each.name
)
def test_a_gpu_trains_and_resumes_as_a_cpu_does(runs, habit):
    on_gpu = dataclasses.replace(
        habit, name=f"{habit.name}-gpu", overrides=(*habit.overrides, *GPU)
    )
    run = straight(runs, on_gpu, "single")
    resumed = runs.resumed(on_gpu, "single")
    assert not differences(resumed, run, apart=habit.apart, without_gradient={}, bound=1e-4)
    if not habit.random and habit.name not in CHAOTIC + DRAW_ON_THE_DEVICE:
        cpu, compare = straight(runs, habit, "single"), {"apart": habit.apart, "bound": 1e-3}
        if differences(run, cpu, without_gradient={}, **compare):
            assert not differences(
                run, cpu, without_gradient=runs.without_gradient(habit), **compare
            )
