"""scripts/runs.py: the state, step, best metric and size of runs, read without torch."""

import json
import os
import time
from pathlib import Path

import pytest

from armature.launcher import lock
from scripts import runs
from tests import in_process
from tests.launcher.test_lock import write as write_lock
from tests.pages.run_files import write
from tests.running import python

ROOT = Path(__file__).parents[1]


@pytest.fixture
def make(tmp_path):
    def make(name: str, *, reason: str | None = None, mode: str = "min", rows: str = "") -> Path:
        path = tmp_path / name
        (path / "checkpoints" / "step=000004").mkdir(parents=True)
        (path / "config.yaml").write_text(f"checkpoint: {{monitor: val/loss, mode: {mode}}}\n")
        (path / "metrics.csv").write_text(
            "step,train/loss,val/loss\n1,3.0,\n2,2.5,0.5\n3,2.0,0.75\n" + rows
        )
        (path / "overrides.txt").write_text("seed=1\n")
        if reason is not None:
            (path / "summary.json").write_text(
                json.dumps({"stop_reason": reason, "planned_steps": 9, "overrides_bytes": 7})
            )
        return path

    return make


def test_runs_of_all_states_are_found_below_a_folder(make, tmp_path):
    held = lock.Lock(make("now"))
    held.acquire()
    make("done", reason="finished")
    make("sweep/0", reason="SIGTERM")
    make("sweep/1")
    found = {Path(run.path).name: run for run in map(runs.describe, runs.find([tmp_path]))}
    assert {name: run.state for name, run in found.items()} == {
        "now": "running", "done": "finished", "0": "stopped (SIGTERM)", "1": "failed",
    }  # fmt: skip
    held.release()
    assert found["done"].planned_steps == 9
    assert all(run.step == 4 for run in found.values())  # a checkpoint is ahead of the rows on disk


def test_a_later_start_that_has_no_summary_yet_has_failed(make):
    path = make("again", reason="finished")
    os.utime(path / "overrides.txt")  # as in a copy of the run
    assert runs.describe(path).state == "finished"
    (path / "overrides.txt").write_text("seed=1\n\n")
    assert runs.describe(path).state == "failed"


def test_the_lock_of_a_dead_process_and_a_silent_one_elsewhere_hold_nothing(make):
    path = make("dead")
    write_lock(path, pid=2147483646)
    assert runs.describe(path).state == "failed"
    (path / lock.NAME).unlink()
    held = write_lock(path, host="elsewhere")
    assert runs.describe(path).state == "running"
    os.utime(held, (time.time() - 2 * lock.LEASE_SECONDS,) * 2)
    assert runs.describe(path).state == "failed"


def test_the_best_value_follows_the_mode_and_skips_what_is_no_number(make):
    assert runs.describe(make("low")).best == 0.5
    high = runs.describe(make("high", mode="max", rows="5,1.0,nan\n6,1.0,0.8\n7,1.0,9"))
    assert (high.best, high.step) == (0.8, 6)  # the last line is still being written


def test_damaged_files_leave_values_unknown(make):
    path = make("damaged", reason="finished")
    for name in ("config.yaml", "summary.json", "metrics.csv"):
        (path / name).write_bytes(b"\xff{: [")
    run = runs.describe(path)
    assert (run.state, run.best, run.step) == ("failed", None, 4)


def test_the_table_has_a_line_per_run_and_the_order_that_was_asked_for(make, tmp_path):
    make("b", reason="finished", rows="5,1.0,0.1\n")
    make("a", reason="max_time")
    found = sorted(map(runs.describe, runs.find([tmp_path])), key=runs.KEYS["best"])
    assert [Path(run.path).name for run in found] == ["b", "a"]
    text = runs.table(found, now=time.time() + 7200).splitlines()
    assert text[0].split() == list(runs.COLUMNS)
    assert "5/9" in text[1]
    assert "val/loss 0.1" in text[1]
    assert "2 h" in text[1]
    assert "stopped (max_time)" in text[2]


def test_it_prints_json_without_importing_torch(make, tmp_path):
    make("one", reason="finished")
    code = (
        f"import sys; sys.argv = ['runs.py', {str(tmp_path)!r}, '--json']; sys.path[:0] = "
        f"[{str(ROOT)!r}]\n"
        "from scripts import runs\nruns.main()\nassert not {'torch', 'lightning'} & "
        "set(sys.modules)"
    )
    assert [run["state"] for run in json.loads(python("-c", code).stdout)] == ["finished"]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    code, shown = in_process.call(runs, tmp_path / "none")
    assert (code, "no such folder" in shown) == (2, True), shown


def test_pages_are_written_of_one_run_and_of_several(tmp_path):
    folders = [write(tmp_path / name, name=name) for name in ("a", "b")]
    in_process.call(runs, "report", *folders)
    assert all("<h1>" in (path / "report.html").read_text() for path in folders)
    assert "val/loss" in in_process.call(runs, "compare", *folders, f"out={tmp_path}/c.html")[1]
    assert (tmp_path / "c.html").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", "nowhere"], "nowhere: not a run directory"),
        (["compare", "nowhere"], "name at least two"),
    ],
)
def test_what_is_no_run_has_no_page(words, message):
    code, shown = in_process.call(runs, *words)
    assert (code, message in shown) == (2, True), shown
    assert "nowhere" not in os.listdir()
