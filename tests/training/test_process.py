"""A rank's log."""

import logging
from pathlib import Path

import lightning.pytorch as L
import pytest
from lightning.pytorch import callbacks
from lightning.pytorch.demos.boring_classes import BoringModel

from armature.training import process


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_log_on_a_full_disk_ends_no_run():
    file = logging.FileHandler("/dev/full")
    file.handle(logging.makeLogRecord({"msg": "line"}))
    process.close(file)


def test_of_lightnings_remarks_those_of_callbacks_are_shown(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    process.quiet()
    asked = [callbacks.ModelSummary(max_depth=2), callbacks.Timer({"seconds": 0})]
    L.Trainer(fast_dev_run=True, callbacks=asked).fit(BoringModel())
    summary, limit = caplog.messages
    assert "Trainable params" in summary
    assert limit.startswith("Time limit reached")
