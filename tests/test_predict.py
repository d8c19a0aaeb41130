"""scripts/predict.py: every sample once, in order, from any number of processes."""

import csv
import json
from types import SimpleNamespace

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from armature import hardware
from armature.data.base import DataModule
from armature.data.feed import Feed
from armature.errors import ConfigError
from armature.training import predict
from tests import in_process


class Ten(DataModule):
    def dataset(self, split):
        return [
            {"inputs": torch.tensor([float(i), -i]), "targets": torch.tensor(i)} for i in range(11)
        ]


class Predictor(L.LightningModule):
    def predict_step(self, batch, batch_idx):
        names = tuple(f"n{i}" for i in batch["targets"].tolist())
        return {"scores": {"x": [*batch["inputs"].bfloat16()]}, "pair": (batch["targets"], names)}


def parts(folder, ranks, task=None, make=lambda: Feed(Ten(), eval_batch_size=2)):
    found = [folder / f"{rank}of{ranks}.jsonl" for rank in range(ranks)]
    for rank, part in enumerate(found):
        trainer = predict.make_trainer(
            part,
            run_dir=folder,
            rank=rank,
            ranks=ranks,
            accelerator="cpu",
            precision="32-true",
        )
        predict.predict(task or Predictor(), make(), trainer)
    return found


def rows_of(file):
    """Return the rows of a file of predictions; of a .csv all values are texts."""
    if file.suffix == ".parquet":
        return pytest.importorskip("pyarrow.parquet").read_table(file).to_pylist()
    lines = file.read_text().splitlines()
    return [*csv.DictReader(lines)] if file.suffix == ".csv" else [*map(json.loads, lines)]


@pytest.mark.guarantee
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_any_number_of_processes_writes_the_same_file(suffix, tmp_path):
    for ranks in (1, 3):
        assert predict.merge(parts(tmp_path, ranks), tmp_path / f"{ranks}.{suffix}") == 11
    one, three = tmp_path / f"1.{suffix}", tmp_path / f"3.{suffix}"
    found = rows_of(one)
    assert found == rows_of(three)
    if suffix != "parquet":
        assert one.read_text() == three.read_text()
    assert [int(row["index"]) for row in found] == list(range(11))
    last = {
        key: json.loads(value) if key.startswith("scores") and suffix == "csv" else value
        for key, value in found[-1].items()
    }
    assert last["scores/x"] == [10.0, -10.0]
    assert (int(last["pair/0"]), last["pair/1"]) == (10, "n10")


class Numbers(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return float(index)


class Plain(L.LightningDataModule):
    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes

    def predict_dataloader(self):
        made = [DataLoader(Numbers(size), batch_size=4, shuffle=size > 0) for size in self.sizes]
        return made if len(made) > 1 else made[0]


class Halves(L.LightningModule):
    """What a row holds differs between samples."""

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return [
            {"half": x / 2, **({"odd": f"{x:g}"} if x % 2 else {"even": x if x else None})}
            for x in batch.tolist()
        ]


@pytest.mark.parametrize("sizes", [(7,), (3, 0, 10)], ids=str)
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_loaders_of_a_plain_data_module_and_rows_of_several_forms(sizes, suffix, tmp_path):
    for ranks in (1, 4):
        written = parts(tmp_path, ranks, task=Halves(), make=lambda: Feed(Plain(sizes)))
        assert predict.merge(written, tmp_path / f"{ranks}.{suffix}") == sum(sizes)
    rows = rows_of(tmp_path / f"1.{suffix}")
    assert rows == rows_of(tmp_path / f"4.{suffix}")
    assert [float(row["half"]) for row in rows] == [i / 2 for size in sizes for i in range(size)]
    assert [row["odd"] for row in rows[:2]] == [None if suffix == "parquet" else "", "1"]
    if len(sizes) > 1:
        assert [int(row["loader"]) for row in rows] == [
            i for i, size in enumerate(sizes) for _ in range(size)
        ]


def test_a_task_that_cannot_predict_is_named(tmp_path):
    with pytest.raises(ConfigError, match="LightningModule has neither predict_step nor forward"):
        parts(tmp_path, 1, task=L.LightningModule())


@pytest.fixture
def script(tmp_path, monkeypatch):
    """scripts/predict.py beside a run, without its handlers of signals in this process."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    made = in_process.load("predict")
    monkeypatch.setattr(made, "end_on_signals", lambda: None)
    return made


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ([], "Type out=predictions.csv"),
        (["out=x.txt"], "ends in .parquet, .csv, .jsonl"),
        (["out=no/x.csv"], "there is no folder"),
        (["out=there.csv"], "exists already"),
        (["out=/proc/x.csv"], "/proc cannot be written"),
        (
            ["out=x.csv", "strategy=fsdp"],
            "strategy=fsdp: each process of this script holds the whole model",
        ),
        (["out=x.csv", "gone"], "gone: type KEY=VALUE"),
    ],
)
def test_a_mistake_ends_with_a_message(typed, message, script, tmp_path, monkeypatch):
    (tmp_path / "there.csv").touch()
    monkeypatch.setattr(
        "armature.loading.open_run", lambda *args, **kwargs: (SimpleNamespace(), tmp_path)
    )
    code, shown = in_process.call(script, "run", *typed)
    assert (code, message in shown) == (2, True), shown


@pytest.mark.parametrize(
    ("devices", "message"),
    [("auto", "=auto: type a number"), (0, "=0: type a"), (5, "=5: this machine has 2 GPUs")],
)
def test_a_number_of_processes_that_cannot_be_is_named(devices, message, script, monkeypatch):
    monkeypatch.setattr(hardware, "gpu_count", lambda: 2)
    with pytest.raises(ConfigError, match=message):
        script.count_ranks(devices, "gpu")
    assert script.count_ranks(5, "cpu") == 5


predicts = predict.predict


def meets_no_samples(task, data, trainer):
    predicts(Halves(), Feed(Plain([0])), trainer)


def test_data_without_samples_are_named_and_leave_no_file(script, tmp_path, monkeypatch):
    data = SimpleNamespace(_target_="mine.Data")
    run = SimpleNamespace(dir=str(tmp_path / "run"))
    cfg = SimpleNamespace(
        trainer=SimpleNamespace(precision="32-true", devices=1), data=data, run=run, callbacks=None
    )
    monkeypatch.setattr("armature.loading.open_run", lambda *args, **kwargs: (cfg, tmp_path))
    monkeypatch.setattr("armature.loading.task_and_weights", lambda *args, **kwargs: (None, dict))
    monkeypatch.setattr("armature.loading.load_data", lambda *args: None)
    monkeypatch.setattr("armature.training.process.quiet", lambda: None)
    monkeypatch.setattr(predict, "predict", meets_no_samples)
    code, shown = in_process.call(script, "run", "out=p.csv")
    assert code == 2
    message = "there are no samples to predict, neither of its predict_dataloader"
    assert f"data._target_=mine.Data: {message}" in shown
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]
