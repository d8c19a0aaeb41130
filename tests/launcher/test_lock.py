"""Two processes never train in one run directory, and a dead one does not keep others from it."""

import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from armature.errors import ConfigError
from armature.launcher import lock
from armature.launcher.lock import Lock
from tests import running


def config(run_dir: Path, *, root: str | None = None):
    return OmegaConf.create(
        {
            "run": {"dir": str(run_dir), "root": str(run_dir.parent), "name": run_dir.name},
            "checkpoint": {"root": root},
            "launch": {"rdzv_endpoint": None},
        }
    )


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine"


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(lock, "LEASE_SECONDS", 1.5)
    monkeypatch.setattr(lock, "REFRESH_SECONDS", 0.1)


def write(folder: Path, *, pid: int | None = None, host: str | None = None) -> Path:
    """Write what another process's lease holds."""
    own = Lock(folder)
    own.acquire()
    file, text = folder / lock.NAME, (folder / lock.NAME).read_text()
    own.release()
    if pid is not None:
        text = text.replace(f"pid={os.getpid()}", f"pid={pid}")
    if host is not None:
        text = text.replace(f"host={socket.gethostname()}", f"host={host}")
    file.write_text(text)
    return file


def dead() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def acquire(folder: Path) -> Lock:
    own = Lock(folder)
    own.acquire()
    return own


def test_the_lock_is_held_while_entered_and_nothing_stays_behind(run_dir):
    with lock.hold(config(run_dir)):
        assert lock.holder(run_dir) == f"process {os.getpid()} on {socket.gethostname()}"
        assert [path.name for path in run_dir.iterdir()] == [lock.NAME]
        (run_dir / "config.yaml").touch()
    assert [path.name for path in run_dir.iterdir()] == ["config.yaml"]


def test_a_living_process_of_this_machine_is_named_at_once(run_dir):
    with lock.hold(config(run_dir)):
        begun = time.monotonic()
        with pytest.raises(
            ConfigError,
            match=rf"in use by process {os.getpid()} on .*another run.name.*: kill {os.getpid()}",
        ):
            acquire(run_dir)
        assert time.monotonic() - begun < 2
        assert [path.name for path in run_dir.iterdir()] == [lock.NAME]
        assert lock.is_held(run_dir)
    assert not lock.is_held(run_dir)


def test_a_dead_process_of_this_machine_is_replaced_at_once(run_dir):
    write(run_dir, pid=dead())
    assert not lock.is_held(run_dir)
    begun = time.monotonic()
    with lock.hold(config(run_dir)):
        assert lock.holder(run_dir).startswith(f"process {os.getpid()} ")
    assert time.monotonic() - begun < 3


def test_a_silent_process_of_another_machine_is_replaced(run_dir, fast, caplog):
    write(run_dir, host="elsewhere")
    begun = time.monotonic()
    acquire(run_dir).release()
    assert time.monotonic() - begun > 1.3
    assert f"waiting to see whether process {os.getpid()} on elsewhere" in caplog.text


def test_a_touching_process_of_another_machine_is_respected(run_dir, fast):
    file = write(run_dir, host="elsewhere")
    done = threading.Event()

    def touch() -> None:
        while not done.wait(0.2):
            os.utime(file)

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="ssh elsewhere kill"):
            acquire(run_dir)
        with pytest.raises(ConfigError, match="ssh elsewhere kill"):
            lock.check(config(run_dir))
    finally:
        done.set()
        thread.join()


def race(folder: str, start, results) -> None:
    start.wait()
    try:
        acquire(Path(folder))
        results.put(os.getpid())
    except ConfigError:
        results.put(None)
    start.wait()


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
    assert lock.holder(run_dir).startswith(f"process {winners[0]} ")
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


HOLDER = """
import sys, time
from omegaconf import OmegaConf
from armature.launcher import lock

lock.REFRESH_SECONDS = 0.05
cfg = {"run": {"dir": sys.argv[1]}, "checkpoint": {"root": None}, "launch": {"rdzv_endpoint": None}}
with lock.hold(OmegaConf.create(cfg)):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def process(run_dir):
    """A process that holds the run directory."""
    environment = {**os.environ, "PYTHONPATH": str(running.ROOT / "src")}
    command = [sys.executable, "-c", HOLDER, str(run_dir)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_process_that_lost_its_lease_ends(run_dir, process, tmp_path):
    (tmp_path / "other").mkdir()
    os.replace(write(tmp_path / "other"), run_dir / lock.NAME)
    _, printed = process.communicate(timeout=30)
    assert process.returncode == lock.EXIT_LOST
    assert f"was taken over by process {os.getpid()}" in printed


def test_a_lease_that_somebody_deletes_is_taken_again(run_dir, process):
    shutil.rmtree(run_dir)
    running.wait_for((run_dir / lock.NAME).exists, seconds=20, what="the lease")
    assert lock.holder(run_dir).startswith(f"process {process.pid} ")
    assert process.poll() is None
