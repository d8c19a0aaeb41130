"""A lock that a killed compilation has left is found and removed; one of a living process is
respected.
"""

import os
import subprocess
import sys
import time

import pytest

from armature.strategies import extension_locks


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setattr(extension_locks, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(extension_locks, "_is_local", lambda folder: True)
    folder = tmp_path / "py311_cpu" / "shm_comm"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    old = time.time() - 60
    for path in (folder / "lock", folder):
        os.utime(path, (old, old))
    return folder / "lock"


@pytest.fixture
def waits(monkeypatch):
    """The seconds of each wait."""
    seconds: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(
        extension_locks.time, "sleep", lambda wait: (seconds.append(wait), sleep(wait))
    )
    return seconds


def test_a_leftover_is_removed_and_named(lock, tmp_path, caplog, waits):
    extension_locks.clear(tmp_path)
    assert not lock.exists()
    assert waits == []
    assert caplog.messages == [
        f"{lock} is removed: a process that was killed while it compiled has left it."
    ]


def test_a_process_that_compiles_is_waited_for(lock, tmp_path, caplog):
    command = [sys.executable, "-c", "import os, time; time.sleep(1); os.unlink('lock')"]
    compiler = subprocess.Popen(command, cwd=lock.parent)
    extension_locks.clear(tmp_path)
    assert compiler.wait() == 0  # it could remove its own lock
    assert len(caplog.messages) == 1
    assert f"If none is, type rm {lock}" in caplog.text


def test_a_lock_that_is_new_is_left_for_a_while(lock, tmp_path, monkeypatch, waits):
    monkeypatch.setattr(extension_locks, "QUIET_SECONDS", 1.0)
    lock.touch()
    began = time.time()
    extension_locks.clear(tmp_path)
    assert time.time() - began > 0.5
    assert sum(waits) < 5
    assert not lock.exists()


def test_on_a_shared_file_system_it_takes_longer(lock, monkeypatch):
    monkeypatch.setattr(extension_locks, "_is_local", lambda folder: False)
    assert extension_locks.seconds_left(lock) > 200


def test_without_a_cache_nothing_happens(tmp_path):
    extension_locks.clear(tmp_path / "none")
