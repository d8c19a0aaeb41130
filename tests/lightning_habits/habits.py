"""The list of habits. `python -m tests.lightning_habits.habits` prints it."""

import dataclasses
import itertools

from tests.lightning_habits import (
    callbacks,
    generative,
    gradients,
    hooks,
    layers,
    loaders,
    manual,
    metrics,
    optimizers,
    schedules,
    sequences,
    settings,
    state,
    teachers,
    vision,
)
from tests.lightning_habits.habit import RESUMES

FILES = (
    settings,
    optimizers,
    schedules,
    manual,
    generative,
    vision,
    metrics,
    teachers,
    sequences,
    layers,
    gradients,
    state,
    hooks,
    callbacks,
    loaders,
)
HABITS = [
    dataclasses.replace(habit, resume=habit.resume or resume)
    for file in FILES
    for habit, resume in zip(file.HABITS, itertools.cycle(RESUMES), strict=False)
]

if __name__ == "__main__":
    for habit in HABITS:
        print(f"{habit.name:24} {habit.layout:6} {habit.resume:12} {' '.join(habit.command())}")
