"""What the monitors say is true, costs no waiting, and leaves metrics.csv alone."""

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from armature.callbacks.monitors import Monitors
from armature.data.base import DataModule
from armature.data.feed import Feed
from armature.models.decoder.model import Decoder
from armature.strategies.single import SingleDevice
from armature.tasks.base import Task
from armature.training import flops, step_log, timings
from armature.training.metrics_csv import MetricsCSV, read
from armature.training.step_log import StepLog
from tests.trainers import quiet_trainer

torch.set_num_threads(1)


class Net(nn.Module):
    """Two layers; `forward` can be made slow."""

    __module__ = "tests.callbacks.model"  # a folder, in which a plan is looked for
    pause = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, inputs, targets=None):
        if inputs.device.type != "meta":
            time.sleep(self.pause)
        outputs = self.down(torch.relu(self.up(inputs)))
        return outputs if targets is None else nn.functional.cross_entropy(outputs, targets)


class Rows(DataModule):
    pause = 0.0

    def dataset(self, split):
        def batch(indices):
            time.sleep(self.pause)
            inputs = torch.stack([torch.full((8,), (index % 17) / 17) for index in indices])
            return {"inputs": inputs, "targets": torch.tensor([index % 2 for index in indices])}

        return Table(batch)


class Padded(Rows):
    """One sample in three has a target that does not count."""

    def dataset(self, split):
        whole = super().dataset(split)

        def batch(indices):
            made = whole.batch(indices)
            made["targets"][torch.tensor([index % 3 == 0 for index in indices])] = -100
            return made

        return Table(batch)


class Table:
    def __init__(self, batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 1000


def fit(
    folder,
    *callbacks,
    steps=6,
    accumulate=1,
    every=2,
    data_pause=0.0,
    model_pause=0.0,
    model=Net,
    micro=4,
    rows=Rows,
):
    """Trains; returns the step log, the task and the Trainer."""
    folder.mkdir(exist_ok=True)
    data = rows()
    data.pause = data_pause
    feed = Feed(data, global_batch_size=micro * accumulate, micro_batch_size=micro)
    log = StepLog(MetricsCSV(folder), feed, every_n_steps=every)
    task = Task(model, optimizer=partial(torch.optim.SGD, lr=0.1))
    trainer = quiet_trainer(
        strategy=SingleDevice(seed=0),
        max_epochs=-1,
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        callbacks=[feed, log, *callbacks],
        logger=[log.csv],
        limit_val_batches=0,
        default_root_dir=folder,
        reload_dataloaders_every_n_epochs=1,
    )
    Net.pause = model_pause
    trainer.fit(task, datamodule=data)
    log.csv.flush()
    return log, task, trainer


def table(file: Path) -> list[dict[str, float]]:
    return [{name: float(value) for name, value in row.items() if value} for row in read(file)[1]]


# ------------------------------------------------------------ waiting for data
@pytest.fixture
def pauses_alone(monkeypatch):
    """Time passes in pauses alone, so that a busy machine adds nothing to them."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic)
    for module in (timings, step_log):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setitem(globals(), "time", SimpleNamespace(sleep=sleep))


@pytest.mark.usefixtures("pauses_alone")
def test_a_slow_loader_shows_as_waiting(tmp_path):
    log, *_ = fit(tmp_path, data_pause=0.01, model_pause=0.005, steps=8)
    shares = [row["data_wait"] for row in table(tmp_path / "timings.csv")]
    assert len(shares) == 4
    assert all(0.4 < share < 0.95 for share in shares)
    assert set(log.summary()) == {"seconds_per_step", "samples_per_second", "data_wait"}


# ------------------------------------------------------------ rows
def test_metrics_csv_is_the_same_with_monitors(tmp_path):
    fit(tmp_path / "without")
    *_, trainer = fit(tmp_path / "with", Monitors(norms_every_n_steps=None))
    assert "epoch" not in trainer.callback_metrics  # ModelCheckpoint names files by Lightning's
    assert (tmp_path / "with/metrics.csv").read_bytes() == (
        tmp_path / "without/metrics.csv"
    ).read_bytes()


def test_rates_and_memory_are_columns_of_timings(tmp_path):
    monitors = Monitors(norms_every_n_steps=None, peak_tflops=1)
    fit(tmp_path, monitors, accumulate=2, steps=20)
    have = table(tmp_path / "timings.csv")
    assert len(have) == 10
    for row in have:
        assert row["samples_per_second"] == pytest.approx(8 / row["seconds_per_step"], rel=1e-3)
        assert row["samples_per_second_per_rank"] == pytest.approx(
            row["samples_per_second"], rel=1e-3
        )
        assert 0 < row["mfu"] < 1
        assert 0 < row["memory/resident_gib"] <= row["memory/peak_gib"] * 1.1


@pytest.mark.parametrize(("size", "parts"), [(16, 4), (6, 6)])  # of six, two have a loss of NaN
def test_what_is_logged_is_the_mean_over_all_targets_of_a_step(tmp_path, size, parts):
    fit(tmp_path / "whole", micro=size, rows=Padded)
    fit(tmp_path / "parts", micro=size // parts, accumulate=parts, rows=Padded)
    whole, parted = (table(tmp_path / name / "metrics.csv") for name in ("whole", "parts"))
    assert {"train/loss", "train/grad_norm"} <= set(whole[0])
    for row, expected in zip(parted, whole, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
        assert 0 < row["train/loss"] < 2


class Reads(TorchDispatchMode):
    """Counts numbers that are read from tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_no_step_reads_a_tensor(tmp_path):
    def count(folder: Path, **kwargs) -> int:
        with Reads() as reads:
            torch.ones(()).item()
            fit(folder, Monitors(norms_every_n_steps=1), every=3, **kwargs)
        return reads.count

    few, many = count(tmp_path / "few", steps=3), count(tmp_path / "many", steps=9)
    assert few == many > 0  # what the set-up reads


def test_impossible_settings_are_refused():
    with pytest.raises(
        ValueError, match=r"callbacks\.monitors\.peak_tflops must be positive, or null. Got 0"
    ):
        Monitors(peak_tflops=0)


def test_the_formula_is_what_the_operators_add_up_to():
    make = partial(Decoder, vocab_size=512, context=64, width=64, layers=2, heads=4, kv_heads=2)
    ids = torch.zeros(3, 64, dtype=torch.long)
    with torch.device("meta"):
        model = make()
    whole = type(
        "Whole",
        (nn.Module,),
        {"forward": lambda self, inputs, targets: model.loss(model(inputs), targets)},
    )()
    assert flops.counted(whole, ids, ids) == pytest.approx(model.flops_per_sample(ids), rel=0.02)
    assert flops.flops_per_sample(make, ids, ids) == model.flops_per_sample(ids)


# ------------------------------------------------------------ several ranks
