"""TensorBoard: one event per row, which reads like Lightning's events, and a full disk does not end
the run.
"""

import io
import logging
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.summary.writer.record_writer import RecordWriter

from armature.loggers import log_hyperparameters, writes_rows
from armature.loggers.tensorboard import TensorBoard, _record

ROWS = [
    {"train/loss": 2.5, "lr": torch.tensor(1e-3), "samples": 32},
    {"train/loss": float("nan"), "val/loss": 1.0},
]


def scalars(folder) -> dict[str, list[tuple[int, str]]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(e.step, f"{e.value:.6g}") for e in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def log_to(logger) -> dict[str, list[tuple[int, str]]]:
    for step, row in enumerate(ROWS, start=7):
        logger.log_metrics(row, step=step)
    logger.log_hyperparams({"width": 64})
    logger.finalize("success")
    return scalars(logger.log_dir)


@pytest.mark.parametrize("prefix", ["", "own"])
def test_it_writes_what_lightnings_logger_writes(tmp_path, prefix):
    kinds = {"ours": TensorBoard, "theirs": TensorBoardLogger}
    logged = {
        name: log_to(kind(str(tmp_path), name=name, version="", prefix=prefix))
        for name, kind in kinds.items()
    }
    assert logged["ours"] == logged["theirs"]
    assert len(logged["ours"]) == 5


def test_each_row_is_one_event_in_one_file(tmp_path):
    logger = TensorBoard(str(tmp_path), name="", version="")
    assert writes_rows(logger)
    logger.experiment.add_text("words", "before")
    logger.write_rows([{"step": 3, "a": 1.0, "b": 2.0}, {"step": 4, "a": 3.0}])
    logger.experiment.add_text("words", "after")
    logger.log_metrics(
        {"both": {"x": 1.0, "y": 2.0}}, step=5
    )  # Lightning's way to draw two curves in one chart
    logger.finalize("success")
    logger.log_metrics({"a": 4.0}, step=5)  # a test after training: there is another file
    logger.finalize("success")
    first, _ = sorted(tmp_path.glob("events.*"))
    found = [
        (e.step, [v.tag for v in e.summary.value])
        for e in EventFileLoader(str(first)).Load()
        if e.summary.value
    ]
    assert [tags for _, tags in found] == [
        ["words/text_summary"],
        ["a", "b"],
        ["a"],
        ["words/text_summary"],
    ]
    assert scalars(tmp_path)["a"] == [(3, "1"), (4, "3"), (5, "4")]
    assert scalars(tmp_path / "both_x") == {"both": [(5, "1")]}


def test_records_are_tensorboards_own_bytes():
    for length in (0, 1, 90, 5000):
        theirs, data = io.BytesIO(), bytes(i * 7 % 256 for i in range(length))
        RecordWriter(theirs).write(data)
        assert theirs.getvalue() == _record(data)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_reported_once_and_ends_only_the_events(tmp_path, caplog):
    logger = TensorBoard(str(tmp_path), name="", version="")
    events = logger._event_writer()
    events.close()
    with Path("/dev/full").open("ab", buffering=0) as full, caplog.at_level(logging.ERROR):
        events._file = full
        for step in (1, 2, 3):
            logger.log_metrics(ROWS[0], step=step)
        logger.save()
        logger.finalize("success")
    assert caplog.text.count("No space left on device") == 1


def test_events_in_an_object_store_go_through_tensorboards_own_writer(monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    logger = TensorBoard("memory://runs", name="a", version="")
    logger.write_rows([{"step": 3, "a": 1.0}, {"step": 4, "a": 2.0}])
    logger.finalize("success")
    (path,) = fsspec.filesystem("memory").glob("/runs/a/events.*")
    content = fsspec.filesystem("memory").cat(path)
    assert content.count(b"a") >= 2


def hyperparameters(folder) -> tuple[dict[str, object], list[str]]:
    """Those that TensorBoard shows, of the first session, and the metrics beside them."""
    from tensorboard.plugins.hparams import plugin_data_pb2

    found = {}
    for file in sorted(folder.glob("events.*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.tag.startswith("_hparams_/"):
                    content = value.metadata.plugin_data.content
                    found.setdefault(
                        value.tag, plugin_data_pb2.HParamsPluginData.FromString(content)
                    )
    session = found["_hparams_/session_start_info"].session_start_info.hparams
    infos = found["_hparams_/experiment"].experiment.metric_infos
    kinds = ("string_value", "number_value", "bool_value")
    values = {
        key: getattr(session[key], next(k for k in kinds if session[key].HasField(k)))
        for key in session
    }
    return values, [info.name.tag for info in infos]


def test_all_hyperparameters_before_the_first_row_are_shown_together(tmp_path):
    logger = TensorBoard(str(tmp_path), name="", version="", metric="val/loss")
    logger.log_hyperparams({"optimizer": {"lr": 0.5}, "run": {"tags": ["a", "b"]}})
    logger.log_hyperparams(
        Namespace(width=64), {"hp/score": 1.0}
    )  # as a module does in on_train_start
    logger.write_rows([{"step": 1, "train/loss": 1.0}])
    logger.finalize("success")
    values, metrics = hyperparameters(tmp_path)
    assert values == {"optimizer/lr": 0.5, "run/tags": "['a', 'b']", "width": 64.0}
    assert metrics == ["val/loss", "hp/score"]
    assert scalars(tmp_path).keys() == {"train/loss", "hp/score"}


def test_a_service_that_refuses_the_configuration_is_a_warning(tmp_path, caplog):
    class Refusing:
        def log_hyperparams(self, params):
            raise RuntimeError("changing parameters is not allowed")

    logger = TensorBoard(str(tmp_path), name="", version="")
    log_hyperparameters([Refusing(), logger], {"seed": 3})
    logger.finalize("success")
    assert (
        "Refusing did not take the configuration (changing parameters is not allowed)"
        in caplog.text
    )
    assert hyperparameters(tmp_path)[0] == {"seed": 3.0}
