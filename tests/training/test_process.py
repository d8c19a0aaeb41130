"""A rank's log."""

import logging
from pathlib import Path

import pytest

from armature.training import process


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_log_on_a_full_disk_ends_no_run():
    file = process.open_log(Path("/dev/full"))
    file.handle(logging.LogRecord("x", logging.INFO, __file__, 0, "line", (), None))
    process.close(file)


def test_a_line_that_is_no_text_does_not_spoil_the_log(tmp_path):
    file = process.open_log(tmp_path / "log")
    for line in ("before", "a\udcff.png × 2", "after"):
        file.handle(logging.LogRecord("x", logging.INFO, __file__, 0, line, (), None))
    process.close(file)
    assert (tmp_path / "log").read_text(encoding="utf-8").splitlines() == [
        "before",
        "a\\udcff.png × 2",
        "after",
    ]
