"""metrics.csv has every step once, in order, however its values arrive."""

import pytest
import torch

from armature import files
from armature.errors import NotSaved
from armature.training.metrics_csv import MetricsCSV, read
from tests.running import meet_a_full_disk


@pytest.fixture
def log(tmp_path):
    return MetricsCSV(tmp_path)


def write(log: MetricsCSV, first: int, last: int) -> None:
    log.write_rows([{"step": step, "train/loss": 1.0 / step} for step in range(first, last + 1)])
    log.write_ready()


def column(log: MetricsCSV, name: str) -> list[str]:
    return [row[name] for row in read(log.file)[1]]


def steps(log: MetricsCSV) -> list[int]:
    return [*map(int, column(log, "step"))]


def test_validation_joins_the_row_of_its_step(log):
    write(log, 1, 3)
    log.step = 3
    log.log_metrics({"val/loss": 0.5, "epoch": 0}, step=2)
    write(log, 4, 5)
    log.finalize("success")
    log.flush()
    columns, rows = read(log.file)
    assert columns == ["step", "train/loss", "val/loss"]
    assert steps(log) == [1, 2, 3, 4, 5]
    assert [row["val/loss"] for row in rows] == ["", "", "0.5", "", ""]


def test_a_value_that_comes_before_its_row_joins_it(log):
    """`self.log` of a step arrives at once, the rows of several steps together."""
    for step in (2, 4):
        log.step = step
        log.log_metrics({"mine": step / 10})
    write(log, 1, 5)
    log.flush()
    assert column(log, "mine") == ["", "0.2", "", "0.4", ""]
    assert steps(log) == [1, 2, 3, 4, 5]


def test_a_value_whose_row_never_comes_has_one_of_its_own(log):
    log.step = 7
    log.log_metrics({"test/loss": 0.5})
    log.flush()
    assert read(log.file)[1] == [{"step": "7", "test/loss": "0.5"}]


def test_going_on_drops_what_came_after_the_checkpoint(log, tmp_path):
    write(log, 1, 4)
    held = dict(log.held)  # what a checkpoint at step 4 keeps
    write(log, 5, 9)
    log.flush()
    again = MetricsCSV(tmp_path)
    again.held = held
    again.resume_from(4)
    write(again, 5, 6)
    again.flush()
    assert steps(again) == [1, 2, 3, 4, 5, 6]


def test_going_on_keeps_what_a_test_added_to_the_last_row(log, tmp_path):
    write(log, 1, 2)
    held = dict(log.held)
    log.step = 2
    log.log_metrics({"test/loss": 0.25})
    log.flush()
    again = MetricsCSV(tmp_path)
    again.held = held
    again.resume_from(2)
    write(again, 3, 3)
    again.flush()
    assert column(log, "test/loss") == ["", "0.25", ""]


def test_a_line_that_a_crash_cut_short_is_left_out(log):
    write(log, 1, 2)
    log.flush()
    written = log.file.read_bytes()
    assert b"\r" not in written
    log.file.write_bytes(written + b"3")
    assert steps(log) == [1, 2]


@pytest.mark.parametrize("content", [b"\xff\xfe1\0,\0", b"step;loss\r\n1;2\r\n"])
def test_a_file_that_is_no_table_of_steps_is_put_aside(content, log, tmp_path):
    log.file.write_bytes(content)
    log.resume_from(4)
    write(log, 5, 6)
    log.flush()
    assert steps(log) == [5, 6]
    assert (tmp_path / "metrics.csv.old").read_bytes() == content


def test_a_file_that_is_removed_while_a_run_trains_has_the_later_rows(log):
    write(log, 1, 4)
    log.file.unlink()
    write(log, 5, 6)
    log.flush()
    assert steps(log) == [4, 5, 6]


def test_rows_that_a_full_disk_lacks_at_the_end_are_reported_beside_another_error(
    log, monkeypatch, caplog
):
    write(log, 1, 2)
    monkeypatch.setattr(files, "replace", meet_a_full_disk)
    log.write_rows([{"step": 3, "train/new": 1.0}])
    log.finalize("failed")
    assert "metrics.csv lacks 2 rows at its end" in caplog.messages[-1]
    with pytest.raises(NotSaved, match="lacks 2 rows"):
        log.flush()


def test_an_error_before_the_resume_leaves_the_file_alone(log, tmp_path):
    write(log, 1, 4)
    log.flush()
    before = log.file.read_bytes()
    again = MetricsCSV(tmp_path)
    again.held = {"step": 4, "val/loss": 0.5}  # from the checkpoint
    again.finalize("failed")
    assert log.file.read_bytes() == before


def test_hooks_may_log_tensors_and_images_and_ask_where_the_logs_are(log, tmp_path):
    log.experiment.add_image("tag", None, 0)
    log.log_metrics({"a": torch.tensor(0.5), "b": torch.tensor([2])})  # pyright: ignore[reportArgumentType]
    log.flush()
    assert read(log.file)[1] == [{"step": "0", "a": "0.5", "b": "2"}]
    assert log.log_dir == log.root_dir == log.save_dir == str(tmp_path)
    with pytest.raises(ValueError, match="does not contain a single element"):
        log.log_metrics({"a": torch.zeros(2)})  # pyright: ignore[reportArgumentType]
