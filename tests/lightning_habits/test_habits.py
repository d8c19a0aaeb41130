"""Modules, callbacks and data modules as users of Lightning write them: exact under every layout
and after a resume.

Without --all-habits (`make habits`) a sample of them runs.
"""

from pathlib import Path

import pytest

from tests.lightning_habits.habits import HABITS
from tests.lightning_habits.runs import VALIDATES_AND_SAVES, Habit, assert_equal, differences
from tests.lightning_habits.sequences import EXTRA_PACKAGES

pytestmark = [pytest.mark.slow]
NAMES = [habit.name for habit in HABITS]
# the sample of those that are resumed from a save at a validation
SAVED_AT_VALIDATION = (
    "swaps_average",
    "unet",
    "tracked",
    "lht",
    "gan",
    "numpy_state",
    "one_cycle",
    "swa",
)
# a stop between a step and its validation: step → what makes the validation due there
OWED = {8: VALIDATES_AND_SAVES, 6: ()}  # inside an epoch, and at its end
OWES_VALIDATION = (
    "plateau_step",
    "checkpoint_counted",
    "swaps_average",
    "throughput",
    "begins_for_validation",
)
ENDS_BEFORE = ("one_epoch", "stops_by_data")  # the stop
NOT_SAVED_AT_VALIDATION = {
    "early_stopping_train": "monitors what is logged when an epoch ends, so it cannot validate "
    "within one",
    "checkpoint_by_steps": "the same",
    "stateful": "expects its own stop",
    "accumulated_skips": "ends before the kill",
    "early_stopping_divergence": "the same",
    "early_stopping_threshold": "the same",
}


def pytest_generate_tests(metafunc):
    if "habit" not in metafunc.fixturenames:
        return
    everything = metafunc.config.getoption("--all-habits")
    cells = [
        (habit, layout)
        for habit in HABITS
        for layout in (habit.layouts if everything else habit.sample)
    ]
    if metafunc.function is test_a_resume_from_the_save_at_a_validation_is_exact:
        chosen = [habit for habit in HABITS if everything or habit.name in SAVED_AT_VALIDATION]
        chosen = [habit for habit in chosen if habit.name not in NOT_SAVED_AT_VALIDATION]
        cells = [(habit, "single") for habit in chosen if "single" in habit.layouts]
    elif metafunc.function is test_a_resume_that_owes_a_validation_is_exact:
        cells = [(habit, layout, step) for habit, layout in _owing(everything) for step in OWED]
        params = [pytest.param(*cell, id=f"{cell[0].name}-{cell[1]}-{cell[2]}") for cell in cells]
        metafunc.parametrize(("habit", "layout", "step"), params)
        return
    elif metafunc.function is test_layouts_agree_with_one_process:
        cells = [
            (habit, layout) for habit, layout in cells if layout != "single" and not habit.random
        ]
    params = [pytest.param(habit, layout, id=f"{habit.name}-{layout}") for habit, layout in cells]
    metafunc.parametrize(("habit", "layout"), params)


def _owing(everything: bool) -> list[tuple[Habit, str]]:
    chosen = [habit for habit in HABITS if everything or habit.name in OWES_VALIDATION]
    chosen = [
        habit for habit in chosen if habit.name not in {*NOT_SAVED_AT_VALIDATION, *ENDS_BEFORE}
    ]
    return [(habit, "single") for habit in chosen if "single" in habit.layouts]


def straight(runs, habit: Habit, layout: str, *overrides: str) -> Path:
    """Return the directory of a run without a stop; end the test if the habit is refused as
    expected.
    """
    if habit.needs is not None and not any(
        (Path(folder) / habit.needs).exists() for folder in EXTRA_PACKAGES
    ):
        pytest.skip(f"{habit.needs} is not in .venv-extras: make habits installs it")
    expected, run = habit.refused.get(layout), runs.straight(habit, layout, *overrides)
    if isinstance(run, Path):
        assert expected is None, f"not refused, though this was expected: {expected}"
        return run
    assert expected is not None, f"refused: {run.output[-3000:]}"
    assert expected in run.output
    assert "Traceback" not in run.output
    pytest.skip(f"refused by name: {expected}")


def test_a_resume_inside_an_epoch_is_exact(runs, habit, layout):
    run = straight(runs, habit, layout)
    assert_equal(run, runs.resumed(habit, layout))


def test_a_resume_from_the_save_at_a_validation_is_exact(runs, habit, layout):
    run = straight(runs, habit, layout, *VALIDATES_AND_SAVES)
    assert_equal(run, runs.resumed_from_validation(habit, layout))


def test_a_resume_that_owes_a_validation_is_exact(runs, habit, layout, step):
    run = straight(runs, habit, layout, *OWED[step])
    assert_equal(run, runs.resumed_owing_validation(habit, layout, *OWED[step], step=step))


def test_layouts_agree_with_one_process(runs, habit, layout):
    run, single = straight(runs, habit, layout), straight(runs, habit, "single")
    found = differences(run, single, apart=habit.apart, without_gradient={})
    if found:
        found = differences(
            run, single, apart=habit.apart, without_gradient=runs.without_gradient(habit)
        )
    assert not found, found


def test_there_are_many_habits_with_names_of_their_own():
    assert len(set(NAMES)) == len(NAMES) >= 40
