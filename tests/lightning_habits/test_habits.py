"""Modules, callbacks and data modules as users of Lightning write them: bit for bit the same after
a resume, and under two ranks the same as in one process.

`make test` runs a sample, which is marked as a guarantee; `make test-all` runs all.
"""

import pytest

from tests.lightning_habits.compare import assert_equal, differences
from tests.lightning_habits.habits import HABITS

pytestmark = [pytest.mark.slow]


def cells(habits):
    params = []
    for habit in habits:
        marks = [pytest.mark.guarantee] if habit.sample else []
        params.append(pytest.param(habit, id=habit.name, marks=marks))
    return pytest.mark.parametrize("habit", params)


@cells(HABITS)
def test_a_resume_is_exact(runs, habit):
    assert_equal(runs.straight(habit, "single"), runs.resumed(habit, "single"))


@cells([habit for habit in HABITS if habit.layout and not habit.random])
def test_two_ranks_agree_with_one_process(runs, habit):
    run, one_process = runs.straight(habit, habit.layout), runs.straight(habit, "single")
    found = differences(run, one_process, apart=habit.apart)
    if found and habit.layout == "ddp2":  # what is rounding is gone in float64
        precise = [runs.straight(habit, each, "64-true") for each in (habit.layout, "single")]
        found = differences(*precise, apart=habit.apart)
    assert not found, found


@cells([habit for habit in HABITS if habit.layout and (habit.random or habit.twice)])
def test_a_resume_of_two_ranks_is_exact(runs, habit):
    run = runs.straight(habit, habit.layout)
    assert_equal(run, runs.resumed(habit, habit.layout))


def test_there_are_many_habits_with_names_of_their_own():
    names = {habit.name for habit in HABITS}
    assert len(names) == len(HABITS) >= 129
