"""Run a habit under a layout: straight, or stopped and started again by the same command."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from armature.callbacks.stop_at import StopAt
from tests.forked import Forks
from tests.lightning_habits.habit import INSIDE, OWED, OWED_AT_END, SAVED, Habit, callback

CONFIGS = Path(__file__).parent / "configs"
PACKAGES = "armature,torch.nn,torch.optim,torchmetrics,lightning.pytorch,tests,builtins"
BASE = (
    "--config-dir",
    str(CONFIGS),
    "task=habit",
    "model=own",
    "optimizer=sgd",
    "scheduler=constant",
    "trainer.max_steps=null",
    "trainer.max_epochs=3",
    "trainer.accelerator=cpu",
    "trainer.test_at_end=false",
    "trainer.log_every_n_steps=3",
    "logger=none",
    f"launch.allowed_packages=[{PACKAGES}]",
    "launch.max_restarts=0",
)
LAYOUTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "single": (1, ("strategy=single",)),
    "ddp2": (2, ("strategy=ddp", "trainer.devices=2")),
    "fsdp2": (2, ("strategy=fsdp", "trainer.devices=2", "strategy.min_num_params=0")),
    "zero2": (2, ("strategy=deepspeed", "trainer.devices=2")),
    "zero3": (2, ("strategy=deepspeed_zero3", "trainer.devices=2")),
}
SECONDS = 60  # until a run is taken for one that hangs
WITHIN_EPOCHS = ("trainer.val_every_n_steps=4", "checkpoint.every_n_steps=4")


@dataclass(frozen=True)
class Stop:
    """How a run of 18 steps, 6 per epoch, is stopped."""

    signal: signal.Signals
    step: int | None  # None: the habit's
    overrides: tuple[str, ...] = ()


STOPS = {
    INSIDE: Stop(signal.SIGTERM, None),
    # goes back to the save at the validation of step 4
    SAVED: Stop(signal.SIGKILL, 6, WITHIN_EPOCHS),
    # between a step and its validation
    OWED: Stop(signal.SIGTERM, 8, WITHIN_EPOCHS),
    OWED_AT_END: Stop(signal.SIGTERM, 6),
}


class Runs:
    """Runs of habits below one folder; each straight run is made once."""

    def __init__(self, forks: Forks) -> None:
        self.forks = forks
        self.straights: dict[tuple[str, str, str], Path] = {}

    def straight(self, habit: Habit, layout: str, precision: str = "32-true") -> Path:
        """Return the directory of the run that nothing stopped."""
        key = habit.name, layout, precision
        if key not in self.straights:
            words = f"trainer.precision={precision}"
            self.straights[key] = self._go(habit, layout, f"straight-{precision}", words, code=0)
        return self.straights[key]

    def resumed(self, habit: Habit, layout: str) -> Path:
        """Return the directory of a run that was stopped and resumed as `habit.resume` has it."""
        stop = STOPS[habit.resume]
        name, step = stop.signal.name, stop.step or habit.stop
        stops = callback(StopAt, signals=f"{{{name}:{step}}}")
        code = -stop.signal if stop.signal == signal.SIGKILL else 128 + stop.signal
        words = ("trainer.precision=32-true", stops)
        self._go(habit, layout, "resumed", *words, code=code)
        return self._go(habit, layout, "resumed", *words, code=0)

    def _go(self, habit: Habit, layout: str, kind: str, *overrides: str, code: int) -> Path:
        ranks, strategy = LAYOUTS[layout]
        run_dir = self.forks.cwd / "outputs" / f"{habit.name}-{layout}-{kind}"
        command = (
            *BASE,
            *overrides,
            *habit.command(),
            *strategy,
            *(habit.also if ranks > 1 else ()),
            *STOPS[habit.resume].overrides,
            f"run.name={run_dir.name}",
        )
        self.forks.train(*command, ranks=ranks, expect=code, seconds=SECONDS)
        return run_dir
