"""A rank has some seconds for each batch, save and part of the start, and none without a limit."""

import csv
import json
import os
from types import SimpleNamespace

import pytest

from armature.training import watchdog
from armature.training.watchdog import AUTO_SECONDS, REST_SECONDS, START_SECONDS, Watchdog
from tests import forked, running


class Maker:
    """Makes watches, and notes the seconds that they allow."""

    def __init__(self, folder):
        self.log, self.now, self.allowed, self.watches = folder / "rank.log", 100.0, [], []
        self.log.touch()

    def __call__(self, timeout):
        self.watches.append(Watchdog(timeout, log=self.log))
        return self.watches[-1]

    def dump_traceback_later(self, seconds, **options):
        self.allowed.append(seconds)

    def cancel_dump_traceback_later(self):
        pass


@pytest.fixture
def make(monkeypatch, tmp_path):
    made = Maker(tmp_path)
    monkeypatch.setenv("ARMATURE_HEARTBEATS", str(tmp_path))
    monkeypatch.setattr(watchdog, "completed_batches", lambda trainer: 7)
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: made.now)
    monkeypatch.setattr(watchdog, "faulthandler", made)
    yield made
    for watch in made.watches:
        watch.stop()


def train(make, watch, *seconds, accumulate=1, last=False):
    state = SimpleNamespace(stage=SimpleNamespace(value="train"))
    trainer = SimpleNamespace(accumulate_grad_batches=accumulate, is_last_batch=last, state=state)
    for index, each in enumerate(seconds):
        make.now += each
        watch.on_train_batch_end(trainer, None, None, None, index)
    return trainer


def test_auto_is_twenty_of_the_slowest_steps_and_more_beside_steps(make):
    watch = make("auto")
    assert make.allowed == [START_SECONDS]
    # two batches are a step, and the first one compiles
    trainer = train(make, watch, 500.0, 500.0, 20.0, 10.0, 2.0, 2.0, accumulate=2)
    assert make.allowed[1] == AUTO_SECONDS
    assert make.allowed[-1] == 20 * 30.0
    watch.rest(trainer)
    assert make.allowed[-1] == REST_SECONDS
    train(make, watch, 900.0)  # the first step behind a validation or save is not measured
    assert watch.slowest == 30.0


def test_a_typed_limit_holds_from_the_first_batch_on(make):
    watch = make(4)
    watch.on_train_start(train(make, watch))
    assert make.allowed == [START_SECONDS, REST_SECONDS]
    trainer = train(make, watch, 1.0)
    assert make.allowed[-1] == 4.0
    watch.on_validation_start(trainer)
    assert make.allowed[-1] == 4.0


def test_the_launcher_reads_place_and_deadline(make, tmp_path):
    watch = make(4)
    train(make, watch, 1.0)
    note = json.loads((tmp_path / str(os.getpid())).read_text())
    assert note == ["train after step 7", 4.0, make.now + 4.0, 0]
    watch.stop()
    assert json.loads((tmp_path / str(os.getpid())).read_text())[2] is None


@pytest.mark.parametrize(("timeout", "watched"), [(None, True), ("auto", False)])
def test_nothing_is_limited_without_a_limit_or_anybody_who_watches(
    timeout, watched, make, monkeypatch, tmp_path
):
    if not watched:
        monkeypatch.delenv("ARMATURE_HEARTBEATS")
    train(make, make(timeout), 1.0)
    assert make.allowed == []
    assert not (tmp_path / str(os.getpid())).exists()


@pytest.mark.slow
def test_the_rank_whose_own_work_takes_longest_is_in_timings(corpus):
    forks = forked.shared()
    forks.train(
        *running.TINY,
        f"data.path={corpus}",
        "strategy=ddp",
        "trainer.devices=2",
        "run.name=slow",
        "trainer.max_steps=10",
        "trainer.log_every_n_steps=5",
        "launch.allowed_packages=[armature,torch.optim,lightning.pytorch,tests]",
        "+callbacks.slow={_target_:tests.training.disturbing.Slow,seconds:0.2}",
        ranks=2,
        expect=0,
        seconds=100,
    )
    with (forks.cwd / "outputs" / "slow" / "timings.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert {row["slowest_rank"] for row in rows} == {"1"}
    assert all(float(row["own_seconds_per_step"]) >= 0.2 for row in rows)
