"""Two processes never train in one run directory, and a dead one does not keep others from it."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from armature.errors import ConfigError
from armature.launcher import lock
from armature.launcher.lock import Holder, Lock
from tests import running


def config(run_dir: Path, *, root: str | None = None):
    return OmegaConf.create(
        {
            "run": {"dir": str(run_dir), "root": str(run_dir.parent), "name": run_dir.name},
            "checkpoint": {"root": root},
            "launch": {"rdzv_endpoint": None},
        }
    )


def holder(run_dir: Path, **changes) -> Holder:
    return replace(Holder.this_process(config(run_dir)), token="another", **changes)


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine"


@pytest.fixture
def fast(monkeypatch):
    for name, seconds in {"REFRESH": 0.05, "SILENCE": 1.0, "WAIT": 0.05, "SETTLE": 0.1}.items():
        monkeypatch.setattr(lock, f"{name}_SECONDS", seconds)
    monkeypatch.setattr(lock._InFiles, "interval", 0.05)


def write(run_dir: Path, **changes) -> Path:
    file = run_dir / lock.NAME
    file.write_text(holder(run_dir, **changes).text())
    return file


def dead() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def acquire(run_dir: Path) -> Lock:
    own = Lock(run_dir, own=Holder.this_process(config(run_dir)))
    own.acquire()
    return own


def test_the_lock_is_held_while_entered_and_nothing_stays_behind(run_dir):
    with lock.hold(config(run_dir)):
        assert json.loads((run_dir / lock.NAME).read_text())["pid"] == os.getpid()
        assert [path.name for path in run_dir.iterdir()] == [lock.NAME]
        (run_dir / "config.yaml").touch()
    assert [path.name for path in run_dir.iterdir()] == ["config.yaml"]


def test_an_error_releases_the_lock_and_removes_an_empty_directory(run_dir):
    with pytest.raises(ArithmeticError), lock.hold(config(run_dir)):
        raise ArithmeticError
    assert not run_dir.exists()


def test_a_living_process_of_this_machine_is_named_at_once(run_dir):
    write(run_dir)
    begun = time.monotonic()
    with pytest.raises(
        ConfigError,
        match=rf"in use by process {os.getpid()} on .* since 20.*another run.name.*kill",
    ):
        acquire(run_dir)
    assert time.monotonic() - begun < 1
    assert [path.name for path in run_dir.iterdir()] == [lock.NAME]


@pytest.mark.parametrize("how", ["dead", "reused id", "zombie"])
def test_a_dead_process_of_this_machine_is_replaced_at_once(run_dir, how, caplog):
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    if how == "zombie":
        running.wait_for(
            lambda: lock._start_time(zombie.pid) is None, seconds=10, what="the zombie"
        )
        write(run_dir, pid=zombie.pid, started="1")
    else:
        write(run_dir, **({"pid": dead()} if how == "dead" else {"started": "1"}))
    begun = time.monotonic()
    with lock.hold(config(run_dir)):
        assert json.loads((run_dir / lock.NAME).read_text())["pid"] == os.getpid()
    assert time.monotonic() - begun < 3
    assert caplog.messages[0].endswith("which has ended.")
    assert len(caplog.messages) == 1
    zombie.wait()


def test_an_earlier_start_of_a_slurm_job_is_replaced_at_once(run_dir, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    write(run_dir, host="node1", machine="other")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    begun = time.monotonic()
    acquire(run_dir)
    assert time.monotonic() - begun < 3


def test_a_second_step_of_the_same_slurm_job_is_refused(run_dir, monkeypatch, fast):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    write(run_dir)
    with pytest.raises(ConfigError, match="or end that one: scancel 17"):
        acquire(run_dir)


def test_a_silent_process_of_another_machine_is_replaced(run_dir, fast, caplog):
    write(run_dir, host="elsewhere", machine="other")
    begun = time.monotonic()
    acquire(run_dir)
    assert time.monotonic() - begun > 0.9
    assert "waiting to see whether process" in caplog.messages[0]
    assert "on elsewhere, which has been silent for 1 s" in caplog.messages[1]


@pytest.mark.parametrize("text", [None, "", "{}"])
def test_a_touching_process_of_another_machine_is_respected(run_dir, fast, text):
    file = write(run_dir, host="elsewhere", machine="other")
    if text is not None:  # of another version
        file.write_text(text)
    done = threading.Event()

    def touch() -> None:
        while not done.wait(0.2):
            os.utime(file)

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        with pytest.raises(
            ConfigError, match="ssh elsewhere kill" if text is None else "in use by another process"
        ):
            acquire(run_dir)
    finally:
        done.set()
        thread.join()


def race(folder: str, start, results) -> None:
    start.wait()
    try:
        acquire(Path(folder))
        results.put(os.getpid())
        time.sleep(1.5)
    except ConfigError:
        results.put(None)


@pytest.mark.parametrize("stale", [False, True])
def test_one_of_several_wins(run_dir, stale):
    if stale:
        write(run_dir, pid=dead())
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(8), context.Queue()
    processes = [
        context.Process(target=race, args=(str(run_dir), start, results)) for _ in range(8)
    ]
    for process in processes:
        process.start()
    winners = [pid for pid in (results.get(timeout=30) for _ in processes) if pid is not None]
    assert len(winners) == 1
    assert json.loads((run_dir / lock.NAME).read_text())["pid"] == winners[0]
    for process in processes:
        process.join()


def test_the_folder_of_checkpoints_is_locked_too(run_dir, tmp_path):
    elsewhere = tmp_path / "root" / run_dir.name
    with lock.hold(config(run_dir, root=str(tmp_path / "root"))):
        assert (elsewhere / lock.NAME).exists()
        other = tmp_path / "other" / run_dir.name
        with (
            pytest.raises(ConfigError, match=f"{elsewhere} is in use"),
            lock.hold(config(other, root=str(tmp_path / "root"))),
        ):
            pass
        assert not other.exists()
    assert not (elsewhere / lock.NAME).exists()


class StoreError(Exception):
    """Of an object store's client, whose classes are no OSError."""


HOLDER = """
import sys, time
from omegaconf import OmegaConf
from armature.launcher import lock

lock.REFRESH_SECONDS = lock._InFiles.interval = 0.05
cfg = {"run": {"dir": sys.argv[1]}, "checkpoint": {"root": None}, "launch": {"rdzv_endpoint": None}}
with lock.hold(OmegaConf.create(cfg)):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_process_that_lost_its_lock_ends(run_dir):
    environment = {**os.environ, "PYTHONPATH": str(running.ROOT / "src")}
    command = [sys.executable, "-c", HOLDER, str(run_dir)]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    write(run_dir)
    _, printed = process.communicate(timeout=30)
    assert process.returncode == lock.EXIT_LOST
    assert f"was taken over by process {os.getpid()}" in printed


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_the_same_command_typed_twice_trains_once(corpus, tmp_path):
    args = [
        "run.name=mine",
        "trainer.max_steps=2000",
        "trainer.val_every_n_steps=2000",
    ]  # no checkpoint until then
    first = running.start(*args, cwd=tmp_path, corpus=corpus)
    try:
        running.wait_for(
            (tmp_path / "outputs/mine/metrics.csv").exists, seconds=120, what="the first row"
        )
        second = running.train(*args, cwd=tmp_path, corpus=corpus, check=False)
        assert second.returncode == 2
        assert f"is in use by process {first.pid}" in second.stderr
        assert f"kill {first.pid}" in second.stderr
        assert "Traceback" not in second.stderr
    finally:
        first.kill()
        first.communicate()
    third = running.train(
        "run.name=mine", "trainer.max_steps=3", "resume=auto", cwd=tmp_path, corpus=corpus
    )
    assert f"is taken over from process {first.pid}" in third.stderr
    assert [row["step"] for row in running.rows(tmp_path / "outputs/mine")][-1] == "3"
    assert not (tmp_path / "outputs/mine/.lock").exists()
