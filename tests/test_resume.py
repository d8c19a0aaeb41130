"""A run that is stopped and goes on writes the very metrics.csv of the run that was not stopped."""

from pathlib import Path

import pytest
import torch

from tests import running
from tests.forked import Forks
from tests.lightning_habits.compare import assert_equal

pytestmark = pytest.mark.slow
CONFIGS = Path(__file__).parent / "resume_configs"
STEPS = 12
BASE = [
    "--config-dir",
    str(CONFIGS),
    "model=dropout_mlp",
    "data=recorded",
    "task=recording",
    "optimizer=adamw",
    "scheduler=cosine",
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    f"trainer.max_steps={STEPS}",
    "trainer.val_every_n_steps=3",
    "trainer.log_every_n_steps=4",
    "trainer.test_at_end=false",
    "logger=none",
    "launch.allowed_packages=[armature,example,torch.optim,lightning.pytorch,tests]",
]
DDP = ["strategy=ddp", "trainer.devices=2"]


class Runs:
    """Runs of one set of overrides, in directories of their own; straight ones are made once."""

    def __init__(self, forks: Forks) -> None:
        self.forks = forks
        self.known: dict[tuple[str, ...], Path] = {}

    def straight(self, *overrides: str, ranks: int = 1) -> Path:
        if overrides not in self.known:
            self.known[overrides] = self.new()
            self.go(self.known[overrides], *overrides, ranks=ranks)
        return self.known[overrides]

    def stopped(
        self, *overrides: str, at: list[int], signal: str = "SIGTERM", ranks: int = 1
    ) -> Path:
        """Stopped at each of the steps, and resumed after each."""
        run_dir = self.new()
        for step in at:
            self.stop(run_dir, *overrides, at=step, signal=signal, ranks=ranks)
        self.go(run_dir, *overrides, ranks=ranks)
        return run_dir

    def stop(
        self, run_dir: Path, *overrides: str, at: int, signal: str = "SIGTERM", ranks: int = 1
    ) -> None:
        target = "_target_:armature.callbacks.stop_at.StopAt"
        stop = f"+callbacks.stop_at={{{target},signals:{{{signal}:{at}}}}}"
        self.go(
            run_dir, *overrides, stop, ranks=ranks, expect={"SIGTERM": 143, "SIGKILL": -9}[signal]
        )

    def go(self, run_dir: Path, *overrides: str, ranks: int = 1, expect: int = 0) -> None:
        self.forks.train(*BASE, f"run.name={run_dir.name}", *overrides, ranks=ranks, expect=expect)

    def new(self) -> Path:
        self.count = getattr(self, "count", 0) + 1
        return self.forks.cwd / "outputs" / f"{self.count:03d}"


@pytest.fixture(scope="module")
def runs(forks):
    return Runs(forks)


def assert_close(straight: Path, resumed: Path) -> None:
    for row, other in zip(running.rows(straight), running.rows(resumed), strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            assert bool(value) == bool(other[name]), (row["step"], name)
            if value:
                assert float(other[name]) == pytest.approx(float(value), rel=1e-5), (
                    row["step"],
                    name,
                )


def seen(run_dir: Path) -> list[str]:
    return (run_dir / "seen.txt").read_text().splitlines()


def samples(run_dir: Path) -> list[int]:
    """The ids of the samples that were trained on, in order, micro-batch for micro-batch."""
    return [int(word) for line in seen(run_dir) for word in line.split()[2:]]


def assert_every_sample_once_an_epoch(run_dir: Path, *, size: int = 20) -> None:
    ids = samples(run_dir)
    for start in range(0, len(ids) - size + 1, size):
        assert sorted(ids[start : start + size]) == list(range(size)), start


# ---------------------------------------------------------------- the same layout: bit for bit
def test_stops_in_the_middle_and_at_the_end_of_an_epoch_leave_no_trace_in_a_stream(runs):
    """With dropout and augmentation in workers; epochs of 5 steps; validation at 3, 6, …; stops at
    3, 5 and 6.
    """
    data = ["data.streamed=true", "data.micro_batch_size=4"]
    straight = runs.straight(*data)
    resumed = runs.stopped(*data, "data.num_workers=2", at=[3, 5, 6])
    assert_equal(straight, resumed)
    assert seen(resumed) == seen(straight)
    assert_every_sample_once_an_epoch(resumed)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed", "deepspeed_zero3"])
def test_three_ranks_leave_no_trace(runs, strategy):
    """A sum of three depends on the order, which a gradient's place in its bucket decides; three
    divide no weight.
    """
    words = [f"strategy={strategy}", "trainer.devices=3", "data.global_batch_size=6"]
    assert_equal(runs.straight(*words, ranks=3), runs.stopped(*words, at=[5], ranks=3))


def test_a_stop_at_every_step_leaves_no_trace(runs):
    """Epochs end within steps (21 samples, 4 a step); validation at the end of each."""
    odd = ["data.samples=21", "trainer.val_every_n_steps=null"]
    straight = runs.straight(*odd)
    assert [bool(row["val/loss"]) for row in running.rows(straight)] == [
        step in (6, 11, 12) for step in range(1, 13)
    ]
    resumed = runs.stopped(*odd, at=list(range(1, STEPS)))
    assert_equal(straight, resumed)
    assert seen(resumed) == seen(straight)
    assert_every_sample_once_an_epoch(resumed, size=21)


def test_a_run_killed_before_its_first_checkpoint_says_that_it_begins_again(runs):
    run_dir = runs.new()
    runs.stop(run_dir, at=2, signal="SIGKILL")
    (run_dir / "metrics.csv").touch()  # of a longer run, whose rows are written once a second
    ended = runs.forks.train(*BASE, f"run.name={run_dir.name}")
    assert f"{run_dir.name} has no checkpoint yet: training begins at step 0" in ended.output
    assert_equal(runs.straight(), run_dir)


@pytest.mark.guarantee
def test_validation_that_was_due_is_run_after_the_resume(runs):
    run_dir = runs.new()
    runs.stop(run_dir, at=3)
    assert "val/loss" not in running.rows(run_dir)[-1]
    runs.stop(run_dir, at=4)
    values = [row["val/loss"] for row in running.rows(run_dir)]
    straight = [
        row["val/loss"]
        for row in running.rows(runs.straight("data.streamed=false", "data.micro_batch_size=4"))
    ]
    assert values[2]
    assert values == straight[:4]


@pytest.mark.guarantee
def test_a_stop_inside_validation_leaves_no_trace(runs):
    """The model has dropout, which validation turns off."""
    data = ["data.streamed=false", "data.micro_batch_size=4"]
    straight, run_dir = runs.straight(*data), runs.new()
    stop = "+callbacks.stop={_target_:tests.resume_parts.StopInValidation,step:3}"
    runs.go(run_dir, *data, stop, expect=143)
    assert "val/loss" not in running.rows(run_dir)[-1]
    runs.go(run_dir, *data)
    assert_equal(straight, run_dir)


def hooks(run_dir: Path) -> list[str]:
    """Return the lines of hooks.txt; of an epoch's starts the first, since a resume inside an epoch
    calls it again.
    """
    started, kept = set(), []
    for line in (run_dir / "hooks.txt").read_text().splitlines():
        key = line.split()[-1] if line.startswith("epoch starts") else None
        if key is None or key not in started:
            kept.append(line)
        started.add(key)
    return kept


@pytest.mark.parametrize("samples", [20, 21, 3])
def test_hooks_are_called_when_they_would_have_been(runs, samples):
    """Epochs of five steps; of five or six; and one in which each step is more than an epoch."""
    hooked = [
        "+callbacks.hooks={_target_:tests.resume_parts.Hooks}",
        f"data.samples={samples}",
        f"trainer.val_every_n_steps={'3' if samples == 3 else 'null'}",
    ]
    straight = runs.straight(*hooked)
    resumed = runs.stopped(*hooked, at=[3, 5, 6, 10, 11])
    assert_equal(straight, resumed)
    assert hooks(resumed) == hooks(straight)


def rates(run_dir: Path) -> list[float]:
    return [float(row["lr"]) for row in running.rows(run_dir)]


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("estimating", [0.1 * (1 - 0.9 * step / STEPS) for step in range(STEPS)]),
        ("epochwise", [0.1] * 5 + [0.05] * 5 + [0.025] * 2),
    ],
)
def test_schedules_go_on(runs, task, expected):
    """One asks the Trainer for the run's length, one moves on an epoch."""
    straight = runs.straight(f"task={task}")
    assert rates(straight) == pytest.approx(expected)
    assert_equal(straight, runs.stopped(f"task={task}", at=[2, 5, 6, 10]))


def test_patience_and_best_so_far_go_on(runs):
    """The loss falls, which `mode: max` takes for no progress: two validations later it stops."""
    early = [
        "+callbacks.early={_target_:lightning.pytorch.callbacks.EarlyStopping,"
        "monitor:val/loss,mode:max,patience:2}",
        "trainer.val_every_n_steps=2",
        "optimizer.lr=1e-4",
    ]
    straight = runs.straight(*early)
    assert len(running.rows(straight)) == 6
    assert_equal(straight, runs.stopped(*early, at=[6]))
    resumed = runs.stopped(*early, at=[2, 3, 5])
    (resumed / "summary.json").unlink()  # as of a run that was killed while it tested
    runs.go(resumed, *early)
    assert_equal(straight, resumed)
    one, other = (
        torch.load(d / "checkpoints/step=000006/meta.pt", weights_only=True)["callbacks"]
        for d in (straight, resumed)
    )
    (name,) = (key for key in one if "EarlyStopping" in key)
    assert one[name] == other[name]
    assert running.summary(resumed)["best_checkpoint"].endswith(
        Path(running.summary(straight)["best_checkpoint"]).name
    )


@pytest.mark.parametrize(
    "layout", [[], ["strategy=fsdp", "trainer.devices=2"]], ids=["single", "fsdp"]
)
def test_a_resume_draws_no_initial_weights(layout, runs):
    words = [
        "model=example",
        "model._target_=tests.resume_parts.NotesDraws",
        "data=example",
        "task=example",
        *layout,
    ]
    drawn, ranks = runs.forks.cwd / "drawn.txt", len(layout) or 1
    straight = runs.straight(*words, ranks=ranks)
    assert drawn.read_text()
    run_dir = runs.new()
    runs.stop(run_dir, *words, at=4, ranks=ranks)
    drawn.unlink()
    runs.go(run_dir, *words, ranks=ranks)
    assert not drawn.exists()
    assert_equal(straight, run_dir)


# ---------------------------------------------------------------- another layout: within the parity
# tolerance
@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param(DDP, ["data.micro_batch_size=1"], id="two ranks, then one with accumulation"),
        pytest.param(["data.micro_batch_size=2"], DDP, id="accumulation, then two ranks"),
        pytest.param(
            ["data.micro_batch_size=1"], ["data.num_workers=2"], id="accumulation, then workers"
        ),
    ],
)
def test_another_layout_makes_the_same_steps(runs, first, then):
    plain = ["model.dropout=0.0"]
    straight = runs.straight(*plain)
    run_dir = runs.new()
    runs.stop(run_dir, *plain, *first, at=5, ranks=2 if first is DDP else 1)
    runs.go(run_dir, *plain, *then, ranks=2 if then is DDP else 1)
    assert_close(straight, run_dir)
    steps = [
        sorted(line.split()[1] + " " + word for line in seen(d) for word in line.split()[2:])
        for d in (straight, run_dir)
    ]
    assert steps[0] == steps[1]


# ---------------------------------------------------------------- loggers
def test_tensorboard_has_each_step_once_in_one_directory(runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged = ["logger=tensorboard", "checkpoint.every_n_steps=2", "trainer.log_every_n_steps=1"]
    values = []
    for run_dir in (runs.straight(*logged), runs.stopped(*logged, at=[5, 9], signal="SIGKILL")):
        events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
        events.Reload()
        values.append([(event.step, event.value) for event in events.Scalars("train/loss")])
        assert [event.step for event in events.Scalars("val/loss")] == [3, 6, 9, 12]
    assert [step for step, _ in values[1]] == list(range(1, STEPS + 1))
    assert values[0] == values[1]


def test_a_longer_limit_continues_a_run_without_validation(train, tmp_path):
    """The end of the first start is then the last that its checkpoint knows, and no end of the
    epoch.
    """
    words = ("trainer.limit_val_batches=0", "trainer.limit_test_batches=0")
    for name, steps in (("whole", 6), ("parts", 3), ("parts", 6)):
        train(f"run.name={name}", f"trainer.max_steps={steps}", *words)
    whole, parts = (running.losses(tmp_path / "outputs" / name) for name in ("whole", "parts"))
    assert len(whole) == 6
    assert parts == whole
