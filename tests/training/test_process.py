"""A rank's log."""

import logging
from pathlib import Path

import pytest

from armature.training import process


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_log_on_a_full_disk_is_reported_once_and_ends_no_run(capsys):
    file = process.LogFile("/dev/full")
    for number in range(3):
        file.handle(logging.LogRecord("x", logging.INFO, __file__, 0, "line %s", (number,), None))
    process.close(file)
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert "/dev/full could not be written ([Errno 28] No space left on device)" in said
