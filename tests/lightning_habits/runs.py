"""Run a habit under a layout, straight or stopped and resumed, and compare two runs."""

import csv
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts import resume_proof
from tests.forked import Ended, Forks
from tests.lightning_habits.gradients import FILE

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
    "trainer.precision=32-true",
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
}
EXIT_REFUSED = 2
SECONDS = 60  # until a run is taken for one that hangs
STEP_OF_STOP = 9  # of 18; epochs have 6
VALIDATES_AND_SAVES = ("trainer.val_every_n_steps=4", "checkpoint.every_n_steps=4")
STEP_OF_KILL = 6  # which goes back to the validation before


@dataclass(frozen=True, kw_only=True)
class Habit:
    """A module, callback or data module as a user of Lightning writes it.

    Attributes:
        task: class below tests.lightning_habits, as "vision.UNet".
        data: name in tests/lightning_habits/data.py `SAMPLES`, or a class as "plain.Vectors".
        also: layout → overrides of that layout.
        refused: layout → words of the message that refuses it before launch.
        layouts: those that are tried.
        random: draws random numbers while training, so layouts cannot agree with one another.
        apart: columns of metrics.csv, and ends of names of weights, that layouts may differ in.
            What is logged without sync_dist is rank 0's value; what follows a bias before
            BatchNorm, which Adam moves by noise, is noise too.
        clock: beginnings of columns of metrics.csv that hold times or loads, which no two runs
            share.
        stop: completed batches at which the run is stopped.
        sample: whether `make test` runs it, and under which layouts.
        needs: a package of .venv-extras, without which the habit is skipped.
    """

    name: str
    task: str
    data: str = "vectors"
    overrides: tuple[str, ...] = ()
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    layouts: tuple[str, ...] = ("single", "ddp2", "fsdp2")
    random: bool = False
    apart: tuple[str, ...] = ()
    clock: tuple[str, ...] = ()
    stop: int = STEP_OF_STOP
    sample: tuple[str, ...] = ()
    needs: str | None = None

    def command(self) -> list[str]:
        data = ["data=samples", f"data.samples={self.data}"]
        if "." in self.data:
            data = ["data=plain", f"data._target_=tests.lightning_habits.{self.data}"]
        return [*BASE, *data, f"task._target_=tests.lightning_habits.{self.task}", *self.overrides]


class Runs:
    """Runs of habits below one folder; each straight run is made once."""

    def __init__(self, forks: Forks) -> None:
        self.forks = forks
        self.straights: dict[tuple[str, str], Path | Ended] = {}

    def straight(self, habit: Habit, layout: str, *overrides: str) -> Path | Ended:
        """Return the directory of the run that nothing stopped, or how it ended if it was
        refused.
        """
        key = (f"{habit.name}{''.join(overrides)}", layout)
        if key not in self.straights:
            run_dir = self.forks.cwd / "outputs" / f"{habit.name}-{layout}-{len(self.straights)}"
            ended = self._go(habit, layout, run_dir, *overrides)
            self.straights[key] = ended if ended.codes[0] == EXIT_REFUSED else run_dir
            assert set(ended.codes) == {0} or ended.codes[0] == EXIT_REFUSED, _tail(ended)
            _drop_columns(run_dir, habit.clock)
        return self.straights[key]

    def without_gradient(self, habit: Habit) -> dict[str, Any]:
        """Return by name which elements of parameters have no gradient in exact arithmetic: from a
        run in float64.
        """
        import torch

        target = "{_target_:tests.lightning_habits.gradients.WithoutGradient}"
        callback = f"+callbacks.without_gradient={target}"
        run = self.straight(habit, "single", "trainer.precision=64-true", callback)
        return torch.load(run / FILE) if isinstance(run, Path) else {}

    def resumed(self, habit: Habit, layout: str) -> Path:
        """Return the directory of a run that was stopped inside an epoch and started again by the
        same command.
        """
        return self._twice(
            habit, layout, signal=signal.SIGTERM, step=habit.stop, code=128 + signal.SIGTERM
        )

    def resumed_from_validation(self, habit: Habit, layout: str) -> Path:
        """Return the directory of a run that was killed and started again from the save at a
        validation before.
        """
        return self._twice(
            habit, layout, *VALIDATES_AND_SAVES, signal=signal.SIGKILL, step=STEP_OF_KILL, code=-9
        )

    def resumed_owing_validation(
        self, habit: Habit, layout: str, *overrides: str, step: int
    ) -> Path:
        """Return the directory of a run that was stopped between a step and its validation, and
        started again.
        """
        return self._twice(
            habit, layout, *overrides, signal=signal.SIGTERM, step=step, code=128 + signal.SIGTERM
        )

    def _twice(
        self,
        habit: Habit,
        layout: str,
        *overrides: str,
        signal: signal.Signals,
        step: int,
        code: int,
    ) -> Path:
        run_dir = (
            self.forks.cwd
            / "outputs"
            / f"{habit.name}-{layout}-{signal.name}-{step}-{len(overrides)}"
        )
        signals = f"signals:{{{signal.name}:{step}}}"
        stop = f"+callbacks.stop_at={{_target_:armature.callbacks.stop_at.StopAt,{signals}}}"
        stopped = self._go(habit, layout, run_dir, *overrides, stop)
        assert stopped.codes[0] == code, f"not stopped at step {step}: {_tail(stopped)}"
        ended = self._go(habit, layout, run_dir, *overrides, stop)
        assert set(ended.codes) == {0}, _tail(ended)
        _drop_columns(run_dir, habit.clock)
        return run_dir

    def _go(self, habit: Habit, layout: str, run_dir: Path, *overrides: str) -> Ended:
        ranks, strategy = LAYOUTS[layout]
        command = (
            *habit.command(),
            *strategy,
            *habit.also.get(layout, ()),
            f"run.name={run_dir.name}",
            *overrides,
        )
        return self.forks.train(*command, ranks=ranks, expect=None, seconds=SECONDS)


def _drop_columns(run_dir: Path, beginnings: tuple[str, ...]) -> None:
    file = run_dir / "metrics.csv"
    if not beginnings or not file.exists():
        return
    columns, rows = resume_proof.read(file)
    kept = [name for name in columns if not name.startswith(beginnings)]
    assert kept != columns, f"{run_dir} has no column {', '.join(beginnings)}"
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, kept, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def _tail(ended: Ended) -> str:
    return f"exit codes {ended.codes}\n{ended.output[-3000:]}"


def assert_equal(straight: Path, resumed: Path) -> None:
    """Metrics, weights, optimizer state and random state are equal bit for bit."""
    difference, _ = resume_proof.compare(straight, resumed)
    assert difference is None, difference.text
    assert (straight / "metrics.csv").read_bytes() == (resumed / "metrics.csv").read_bytes()


def differences(
    run_dir: Path,
    single: Path,
    *,
    apart: tuple[str, ...],
    without_gradient: dict[str, Any],
    bound: float = 1e-5,
) -> list[str]:
    """Return what differs by more than `bound` (gradient norm: ten times that) from the run of one
    process.
    """
    found = []
    rows, others = (_rows(path / "metrics.csv") for path in (run_dir, single))
    if [row["step"] for row in rows] != [row["step"] for row in others]:
        return [
            f"steps {[row['step'] for row in rows]}, in one process "
            f"{[row['step'] for row in others]}"
        ]
    for column in others[0]:
        worst = max(
            (_relative(row.get(column, ""), other[column]), row["step"])
            for row, other in zip(rows, others, strict=True)
        )
        allowed = 10 * bound if column == "train/grad_norm" else bound
        if worst[0] > allowed and column not in apart:
            found.append(f"{column} by {worst[0]:.1e} at step {worst[1]}")
    weights, expected = weights_of(run_dir), weights_of(single)
    if weights.keys() != expected.keys():
        return [*found, f"weights {sorted(weights.keys() ^ expected.keys())}"]
    for name, value in expected.items():
        own, value = (v if v.is_complex() else v.double() for v in (weights[name], value))
        difference = own - value
        if name in without_gradient:
            difference[without_gradient[name]] = 0
        relative = float(difference.norm()) / max(float(value.norm()), 1e-12)
        if relative > bound and not name.endswith(apart):
            found.append(f"{name} by {relative:.1e}")
    return found


def weights_of(run_dir: Path) -> dict[str, Any]:
    """Return the weights and buffers of a run's last checkpoint, by name."""
    from armature.checkpoint import resume, storage
    from armature.checkpoint import state as checkpoint

    path = resume.last_checkpoint(run_dir)
    assert path is not None
    saved = storage.read_metadata(path).state_dict_metadata
    tensors = checkpoint.load_tensors(path, saved, saved)
    return {
        name: tensor for name, tensor in tensors.items() if not name.startswith(checkpoint.RESERVED)
    }


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def _relative(value: str, other: str) -> float:
    if not value or not other:
        return 0.0 if value == other else float("inf")
    one, two = float(value), float(other)
    return 0.0 if one == two else abs(one - two) / max(abs(two), 1e-12)
