"""TensorBoard: one event a row, which reads as Lightning's do, and a full disk does not end the run."""

import errno
import logging

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from armature.callbacks.tensorboard import TensorBoard

ROWS = [{"train/loss": 2.5, "lr": torch.tensor(1e-3), "samples": 32}, {"train/loss": float("nan"), "val/loss": 1.0}]


def scalars(folder) -> dict[str, list[tuple[int, str]]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, f"{e.value:.6g}") for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def log_to(logger) -> dict[str, list[tuple[int, str]]]:
    for step, row in enumerate(ROWS, start=7):
        logger.log_metrics(row, step=step)
    logger.log_hyperparams({"width": 64})
    logger.finalize("success")
    return scalars(logger.log_dir)


@pytest.mark.parametrize("prefix", ["", "own"])
def test_it_writes_what_lightning_s_logger_writes(tmp_path, prefix):
    kinds = {"ours": TensorBoard, "theirs": TensorBoardLogger}
    logged = {name: log_to(kind(str(tmp_path), name=name, version="", prefix=prefix)) for name, kind in kinds.items()}
    assert logged["ours"] == logged["theirs"]
    assert len(logged["ours"]) == 5


def test_a_row_is_one_event(tmp_path):
    logger = TensorBoard(str(tmp_path), name="", version="")
    written = []
    logger.experiment._get_file_writer().event_writer.add_event = written.append
    logger.log_metrics(ROWS[0], step=3)
    assert [(event.step, len(event.summary.value)) for event in written] == [(3, 3)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # that thread writes nothing more
def test_a_full_disk_is_told_once_and_ends_only_the_events(tmp_path, caplog):
    logger = TensorBoard(str(tmp_path), name="", version="")
    worker = logger.experiment._get_file_writer().event_writer._async_writer

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    worker._writer.write = full
    with caplog.at_level(logging.ERROR):
        logger.log_metrics(ROWS[0], step=1)
        worker._worker.join(timeout=10)  # it ends with the error
        for step in (2, 3):
            logger.log_metrics(ROWS[0], step=step)
        logger.save()
        logger.finalize("success")
    assert caplog.text.count("No space left on device") == 1
