"""The list of habits. `PYTHONPATH=src python -m tests.lightning_habits.habits` prints it."""

import dataclasses
import importlib
import itertools

from tests.lightning_habits.habit import RESUMES

NAMES = """settings optimizers schedules manual gradients layers teachers images sequences metrics
    state hooks callbacks loaders"""
FILES = [importlib.import_module(f"tests.lightning_habits.{name}") for name in NAMES.split()]
HABITS = [
    dataclasses.replace(habit, resume=habit.resume or resume)
    for habit, resume in zip(
        (habit for file in FILES for habit in file.HABITS), itertools.cycle(RESUMES), strict=False
    )
]

if __name__ == "__main__":
    for habit in HABITS:
        print(f"{habit.name:24} {habit.layout:6} {habit.resume:12} {' '.join(habit.command())}")
