"""A save that fails: what is reported, what is kept, and that training continues."""

import errno
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from armature.checkpoint import directory
from armature.checkpoint.writer import CheckpointWriter
from armature.errors import NotSaved
from armature.training import checkpointing
from armature.training.checkpointing import Checkpointing
from armature.training.stop import StoppedBySignal
from tests.support.parity.harness import on_ranks
from tests.support.volume import CollectiveCounter
from tests.trainers import quiet_trainer

POLICY = {
    "every_n_steps": 1,
    "every_n_minutes": None,
    "keep_last": 2,
    "keep_best": 0,
    "keep_every_n_steps": 4,
    "monitor": "val/loss",
    "mode": "min",
    "at_end": True,
    "background": False,
    "on_failure": "continue",
}


class Trainer:
    """As much of one as a save asks for; its disk is full at the given steps."""

    is_global_zero, world_size, callbacks, strategy, should_stop = True, 1, (), None, False
    fit_loop = SimpleNamespace(
        epoch_loop=SimpleNamespace(
            validation_is_due=False, batch_progress=SimpleNamespace(is_last_batch=False)
        )
    )

    def __init__(self, *full_at: int) -> None:
        self.lightning_module = L.LightningModule()
        self.global_step, self.full_at = 0, full_at

    def save_checkpoint(self, path: Path, storage_options: CheckpointWriter) -> None:
        if self.global_step in self.full_at:
            directory.part_of(path).mkdir(parents=True)
            raise OSError(errno.ENOSPC, "No space left on device")
        storage_options.save(path, {}, {}, entries={"step": self.global_step})


def end(callback: Checkpointing, trainer: Any) -> None:
    callback.training_ends(trainer)
    callback.training_ended(trainer)


class Quiet:
    def flush(self, trainer: L.Trainer) -> None:
        """No rows."""

    def restart_clock(self) -> None:
        """No rate."""


def made(folder: Path, **policy: Any) -> Checkpointing:
    log: Any = Quiet()
    return Checkpointing(folder, log, POLICY | policy)


def test_modules_find_folder_and_last_checkpoint_by_lightnings_names(tmp_path):
    trainer: Any = Trainer()
    callback = made(tmp_path)
    assert (callback.dirpath, callback.last_model_path, callback.best_model_path) == (
        str(tmp_path),
        "",
        "",
    )
    trainer.global_step = 1
    callback._save(trainer)
    assert callback.last_model_path == str(tmp_path / "step=000001")


def saves(
    folder: Path, *, steps: int, full_at: set[int], on_failure: str = "continue"
) -> list[str]:
    trainer: Any = Trainer(*full_at)
    callback = made(folder, on_failure=on_failure)
    for step in range(1, steps + 1):
        trainer.global_step = step
        callback._save(trainer)
    return sorted(path.name for path in folder.iterdir())


def test_the_last_ones_and_milestones_are_kept(tmp_path):
    assert saves(tmp_path, steps=7, full_at=set()) == [
        "last",
        "step=000004",
        "step=000006",
        "step=000007",
    ]


def test_a_full_disk_ends_the_save_and_no_more(tmp_path, caplog):
    names = saves(tmp_path, steps=3, full_at={2, 3})
    assert names == ["last", "step=000001"]
    assert directory.problem(tmp_path / "step=000001") is None
    assert (
        "The checkpoint of step 2 could not be saved: [Errno 28] No space left on device"
        in caplog.text
    )
    assert "No space left on device. Earlier ones are untouched (last: step=000001)" in caplog.text
    assert saves(tmp_path, steps=2, full_at={1})[:1] == ["last"]  # the next save tries again


def test_on_failure_stop_ends_the_run(tmp_path):
    said = (
        r"step 2 could not be saved: .*No space left.*\(last: step=000001\). "
        r"checkpoint.on_failure=stop ends the run: "
    )
    with pytest.raises(NotSaved, match=said):
        saves(tmp_path, steps=3, full_at={2}, on_failure="stop")


@pytest.mark.parametrize("hook", ["end", "on_exception", "teardown"])
def test_a_save_in_the_background_is_complete_when_training_ends(tmp_path, monkeypatch, hook):
    write, may_end = directory.write_manifest, threading.Event()

    def slow_write(*args: Any) -> None:
        may_end.wait(60)
        time.sleep(0.2)
        write(*args)

    monkeypatch.setattr(directory, "write_manifest", slow_write)
    trainer: Any = Trainer()
    callback = made(tmp_path, background=True, at_end=False)
    trainer.global_step = 1
    callback._save(trainer)
    assert not (tmp_path / "step=000001").exists()
    may_end.set()
    if hook == "end":
        end(callback, trainer)
    elif hook == "teardown":
        callback.teardown(trainer, trainer, "fit")
    else:
        callback.on_exception(trainer, trainer, ValueError("another rank's"))
    assert directory.problem(tmp_path / "step=000001") is None
    assert directory.read_last(tmp_path) == "step=000001"


def test_a_rank_that_fails_reports_its_save_and_keeps_its_own_error(tmp_path, monkeypatch, caplog):
    def full_disk(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(directory, "write_manifest", full_disk)
    trainer: Any = Trainer()
    trainer.global_step = 1
    callback = made(tmp_path, background=True)
    callback._save(trainer)
    callback.on_exception(trainer, trainer, ValueError("the rank's own"))
    assert (
        "The last checkpoint could not be saved: rank 0 failed: OSError: [Errno 28] No"
        in caplog.text
    )


def in_the_background(
    folder: Path, monkeypatch, *, failures: int, on_failure: str = "continue"
) -> tuple[Any, Any]:
    """Return a callback whose save of step 1 has begun in the background, and fails, and its
    trainer.
    """
    write, left = directory.write_manifest, [failures]

    def full_disk(*args: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*args)

    monkeypatch.setattr(directory, "write_manifest", full_disk)
    trainer: Any = Trainer()
    trainer.global_step, trainer.state = 1, SimpleNamespace(fn="fit")
    monkeypatch.setattr(checkpointing, "OurTrainer", Trainer)
    callback = made(folder, background=True, keep_best=1, on_failure=on_failure)
    callback._save(trainer, 0.5)
    return callback, trainer


@pytest.mark.parametrize("how", ["stopped", "ended"])
def test_a_save_in_the_background_that_failed_is_made_again_at_the_end(
    tmp_path, monkeypatch, caplog, how
):
    callback, trainer = in_the_background(tmp_path, monkeypatch, failures=1)
    if how == "stopped":
        callback.on_exception(trainer, trainer, StoppedBySignal("SIGTERM"))
    else:
        end(callback, trainer)
    assert directory.problem(tmp_path / "step=000001") is None
    assert "The checkpoint of step 1 could not be saved" in caplog.text
    assert callback.scores == {1: 0.5}


def test_a_save_that_fails_at_a_stop_leaves_the_stop_as_it_is(tmp_path, monkeypatch, caplog):
    callback, trainer = in_the_background(tmp_path, monkeypatch, failures=9)
    callback.on_exception(trainer, trainer, StoppedBySignal("SIGTERM"))
    assert caplog.text.count("could not be saved") == 2
    callback, trainer = in_the_background(tmp_path, monkeypatch, failures=9)
    with pytest.raises(NotSaved, match=r"No space left.*The run is not finished without it"):
        end(callback, trainer)
    callback, trainer = in_the_background(tmp_path, monkeypatch, failures=9, on_failure="stop")
    with pytest.raises(NotSaved, match="No space left"):
        callback.on_exception(trainer, trainer, StoppedBySignal("SIGTERM"))


def saved_by_time() -> tuple[list[int], list[tuple[int, str]]]:
    """Return the steps of saves where only rank 1's clock says that the time is up, and the
    collectives by step.
    """
    saved, sent = [], []
    minutes = 0.0 if torch.distributed.get_rank() else 1000.0
    callback = made(Path(), every_n_steps=None, every_n_minutes=minutes)
    trainer: Any = SimpleNamespace(world_size=2, fit_loop=Trainer.fit_loop)
    callback._save = lambda trainer, **_: (
        saved.append(trainer.global_step),
        setattr(callback, "_due", False),
    )  # pyright: ignore[reportAttributeAccessIssue]
    for step in range(1, 26):
        trainer.global_step = step
        with CollectiveCounter() as counter:
            callback.step_ended(trainer)
        sent += [(step, each["kind"]) for each in counter.collectives]
    trainer.should_stop, trainer.lightning_module = False, L.LightningModule()
    callback.training_ends(trainer)
    return saved, sent


@pytest.mark.slow
def test_ranks_agree_that_the_time_is_up_without_waiting_for_each_other():
    for saved, sent in on_ranks(saved_by_time, ranks=2):
        assert saved == [10, 20, 25]
        assert sent == [(9, "all_reduce"), (19, "all_reduce")]


def test_a_checkpoint_that_somebody_else_saves_leaves_last_alone(tmp_path):
    trainer = quiet_trainer(max_steps=1)
    trainer.fit(BoringModel())
    trainer.save_checkpoint(tmp_path / "step=000001")
    assert directory.problem(tmp_path / "step=000001") is None
    assert directory.read_last(tmp_path) is None
    writer = CheckpointWriter(on_saved=lambda path: directory.write_last(tmp_path, path.name))
    trainer.save_checkpoint(tmp_path / "step=000002", storage_options=writer)
    assert directory.read_last(tmp_path) == "step=000002"
    with pytest.raises(
        TypeError, match=r"storage_options must be a CheckpointWriter or None\. Got 's3'"
    ):
        trainer.save_checkpoint(tmp_path / "step=000003", storage_options="s3")


def test_scores_of_another_monitor_do_not_count_after_a_resume(tmp_path, caplog):
    (tmp_path / "step=000002").mkdir()
    first = made(tmp_path, keep_best=1)
    first.scores = {2: 0.5, 4: 0.4}  # the second was removed
    saved = first.state_dict()
    for changes, scores in [
        ({}, {2: 0.5}),
        ({"monitor": "val/accuracy"}, {}),
        ({"mode": "max"}, {}),
    ]:
        resumed = made(tmp_path, keep_best=1, **changes)
        resumed.load_state_dict(saved)
        assert resumed.scores == scores
    assert (
        "checkpoint.monitor=val/accuracy checkpoint.mode=min: scores by val/loss (min) do not count"
        in caplog.text
    )
    assert len(caplog.messages) == 2


def test_the_best_one_stays_until_a_better_one_is_written(tmp_path, monkeypatch):
    trainer: Any = Trainer(3)  # the disk is full at step 3
    policy = {"keep_best": 1, "keep_last": 1, "keep_every_n_steps": None}
    callback = made(tmp_path, background=True, **policy)
    write, finish, finishing = directory.write_manifest, callback.writer.finish, threading.Event()
    monkeypatch.setattr(
        directory, "write_manifest", lambda *args: (finishing.wait(60), write(*args))
    )
    callback.writer.finish = lambda: (finishing.set(), finish(), finishing.clear())  # pyright: ignore[reportAttributeAccessIssue]
    for step, score in [(1, 0.5), (2, None), (3, 0.4)]:
        trainer.global_step = step
        callback._save(trainer, score)  # finishes the save before
    callback.writer.finish()
    assert sorted(path.name for path in tmp_path.glob("step=*")) == ["step=000001", "step=000002"]
    assert callback.best == tmp_path / "step=000001"
    trainer.global_step = 4
    callback._save(trainer, 0.3)
    callback.writer.finish()
    assert sorted(path.name for path in tmp_path.glob("step=*")) == ["step=000004"]
