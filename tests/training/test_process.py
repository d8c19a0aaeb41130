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


def test_a_line_that_is_no_text_does_not_spoil_the_log(tmp_path):
    file = process.LogFile(tmp_path / "log")
    for line in ("before", "a\udcff.png × 2", "after"):
        file.handle(logging.LogRecord("x", logging.INFO, __file__, 0, line, (), None))
    process.close(file)
    assert (tmp_path / "log").read_text(encoding="utf-8").splitlines() == [
        "before",
        "a\\udcff.png × 2",
        "after",
    ]
