"""Start train.py on code of users, and compare runs by what lies on disk."""

import csv
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests import running
from tests.forked import Ended, Forks

CONFIGS = Path(__file__).parent / "configs"
PACKAGES = (
    "launch.allowed_packages="
    "[armature,torch.nn,torch.optim,torchmetrics,lightning.pytorch,tests,example]"
)
BOUND = 1e-5
NORM_BOUND = 1e-4  # of gradient norms, which are differences of larger numbers near the end
SMALLEST = 0.1  # of a weight that 1e-5 is relative to: a bias that began at 0 is rounding at first
BASE = (
    "--config-dir",
    str(CONFIGS),
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "trainer.test_at_end=false",
    "logger=none",
    PACKAGES,
    "launch.max_restarts=0",
)
LAYOUTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "single": (1, ("strategy=single",)),
    "single, micro-batch 2": (1, ("strategy=single", "data.micro_batch_size=2")),
    "ddp 2": (2, ("strategy=ddp",)),
    "ddp 2, micro-batch 2": (2, ("strategy=ddp", "data.micro_batch_size=2")),
    "fsdp 2": (2, ("strategy=fsdp", "strategy.min_num_params=0")),
    "fsdp 2, micro-batch 2": (
        2,
        ("strategy=fsdp", "strategy.min_num_params=0", "data.micro_batch_size=2"),
    ),
    "deepspeed 2": (2, ("strategy=deepspeed",)),
    "hsdp 4": (4, ("strategy=hsdp", "strategy.shard=2", "strategy.min_num_params=0")),
    "tensor 2": (2, ("strategy=tensor",)),
    "pipeline 2": (
        2,
        ("strategy=pipeline", "strategy.microbatches=2", "data.micro_batch_size=4"),
    ),
    "fsdp 2 × tensor 2": (
        4,
        ("strategy=fsdp_tensor", "strategy.tensor=2", "strategy.min_num_params=0"),
    ),
}


def of_user(module: str, *overrides: str) -> tuple[str, ...]:
    """Return the command of a module in users.py: two epochs of six steps."""
    return (
        "task=users",
        f"task._target_=tests.guarantees.users.{module}",
        "data=users",
        "model=own",
        "trainer.max_steps=12",
        "trainer.val_every_n_steps=4",
        *overrides,
    )


def of_example(*overrides: str) -> tuple[str, ...]:
    """Return the command of src/example, whose module is a plain one and whose model has a plan."""
    return (
        "experiment=example",
        "data.samples=60",
        "data.held_out=20",
        "data.global_batch_size=8",
        "model.width=16",
        "model.layers=2",
        "trainer.max_epochs=null",
        "trainer.max_steps=12",
        "trainer.val_every_n_steps=4",
        *overrides,
    )


class Runs:
    """Runs below one folder; an undisturbed one is made once."""

    def __init__(self, forks: Forks) -> None:
        self.forks = forks
        self.straights: dict[tuple[str, ...], Path] = {}
        self.converted: dict[Path, dict[str, torch.Tensor]] = {}
        self.count = 0

    def new(self) -> Path:
        self.count += 1
        return self.forks.cwd / "outputs" / f"{self.count:03d}"

    def start(
        self,
        run_dir: Path,
        command: tuple[str, ...],
        layout: str,
        *overrides: str,
        expect: int | None = 0,
    ) -> Ended:
        """Start train.py once, as the ranks of this layout. `expect`: exit code of the run."""
        ranks, words = LAYOUTS[layout]
        ended = self.forks.train(
            *BASE,
            *command,
            *words,
            f"trainer.devices={ranks}",
            f"run.name={run_dir.name}",
            *overrides,
            ranks=ranks,
            expect=None,
            seconds=100,
        )
        # of several ranks, the first one's code is the run's
        assert expect is None or ended.codes[0] == expect, (
            f"exit codes {ended.codes}\n{ended.output[-4000:]}"
        )
        assert expect != 0 or set(ended.codes) == {0}, ended.codes
        return ended

    def straight(self, command: tuple[str, ...], layout: str = "single") -> Path:
        key = (*command, layout)
        if key not in self.straights:
            self.straights[key] = self.new()
            self.start(self.straights[key], command, layout)
        return self.straights[key]

    def stopped(
        self, command: tuple[str, ...], layout: str, *, at: list[int], rank: int = 0
    ) -> Path:
        """Return the directory of a run in which this rank got SIGTERM at each of these steps, and
        which was resumed by the same command each time. Several ranks may make one step more.
        """
        run_dir, stop = self.new(), signal_at(at, rank=rank)
        for _ in at:
            self.start(run_dir, command, layout, stop, expect=143)
        self.start(run_dir, command, layout, stop)
        return run_dir

    def script(self, name: str, *arguments: str) -> str:
        return running.script(
            name,
            *arguments,
            cwd=self.forks.cwd,
            PYTHONPATH=running.PYTHONPATH,
        ).stdout

    def weights(self, path: Path) -> dict[str, torch.Tensor]:
        """Return weights and buffers of a run's end, or of a checkpoint, which scripts/convert.py
        writes.
        """
        if path not in self.converted:
            file = self.forks.cwd / f"{len(self.converted)}.safetensors"
            self.script("convert.py", str(path), str(file))
            self.converted[path] = load_file(file)
        return self.converted[path]

    def assert_equal(self, run_dir: Path, other: Path) -> None:
        """Every value of metrics.csv and every weight at the end is the same, bit for bit."""
        for row, expected in zip(rows(run_dir), rows(other), strict=True):
            assert row == expected, f"resumed: {row}\nstraight: {expected}"
        one, two = self.weights(run_dir), self.weights(other)
        assert one.keys() == two.keys()
        differing = [name for name in one if not torch.equal(one[name], two[name])]
        assert not differing, differing

    def assert_close(self, run_dir: Path, other: Path) -> None:
        """Every value of metrics.csv and every weight at the end agrees within 1e-5."""
        found, steps = rows(run_dir), rows(other)
        assert [row["step"] for row in found] == [row["step"] for row in steps]
        far = [
            f"{column} by {distance:.1e} at step {expected['step']}"
            for row, expected in zip(found, steps, strict=True)
            for column, value in expected.items()
            if (distance := relative(row.get(column, ""), value))
            > (NORM_BOUND if column == "train/grad_norm" else BOUND)
        ]
        one, two = self.weights(run_dir), self.weights(other)
        assert one.keys() == two.keys()
        for name, value in two.items():
            difference = float((one[name].double() - value.double()).norm())
            size = max(float(value.double().norm()), SMALLEST * value.numel() ** 0.5)
            if difference > BOUND * size:
                far.append(f"{name} by {difference / size:.1e} at the end")
        assert not far, far


def signal_at(steps: list[int], *, name: str = "SIGTERM", rank: int = 0) -> str:
    return (
        "+callbacks.signal={_target_:tests.guarantees.users.Signal,"
        f"steps:[{','.join(map(str, steps))}],name:{name},rank:{rank}}}"
    )


def rows(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def relative(value: str, other: str) -> float:
    if not value or not other:
        return 0.0 if value == other else float("inf")
    return abs(float(value) - float(other)) / max(abs(float(other)), 1e-12)


def samples(run_dir: Path) -> list[tuple[int, list[int]]]:
    """Return the samples of each optimizer step in ascending order, over all ranks."""
    seen: dict[int, list[int]] = {}
    for line in (run_dir / "seen.txt").read_text().splitlines():
        step, _, *ids = map(int, line.split())
        seen.setdefault(step, []).extend(ids)
    return [(step, sorted(ids)) for step, ids in sorted(seen.items())]


def command(*words: str) -> list[str]:
    return [sys.executable, str(running.ROOT / "train.py"), *words]
