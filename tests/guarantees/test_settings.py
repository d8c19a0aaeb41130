"""Sentence 6: a typed setting takes effect or is named, also at a resume."""

import pytest

from tests.guarantees.runs import of_example, of_user, rows, signal_at
from tests.sampled import sampled

pytestmark = pytest.mark.slow


def column(run_dir, name):
    return [row[name] for row in rows(run_dir) if row[name]]


TAKES_EFFECT = {  # what is typed: what metrics.csv shows of it
    "optimizer.lr=0.125": lambda run, _: max(map(float, column(run, "lr"))) == 0.125,
    "scheduler=constant": lambda run, _: len(set(column(run, "lr")[2:])) == 1,
    "optimizer.weight_decay=30": lambda run, usual: _differ(run, usual, "train/loss"),
    "seed=1": lambda run, usual: _differ(run, usual, "train/loss"),
    "model.width=24": lambda run, usual: _differ(run, usual, "train/loss"),
    "data.noise=0.5": lambda run, usual: _differ(run, usual, "train/loss"),
    "data.global_batch_size=12": lambda run, _: column(run, "samples")[:2] == ["12", "24"],
    "trainer.max_steps=5": lambda run, _: len(rows(run)) == 5,
    "trainer.gradient_clip_val=1e-8": lambda run, usual: _differ(run, usual, "train/loss"),
    "trainer.val_every_n_steps=3": lambda run, _: len(column(run, "val/loss")) == 4,
    "trainer.limit_val_batches=0": lambda run, _: "val/loss" not in rows(run)[0],
    "trainer.precision=bf16-mixed": lambda run, usual: _differ(run, usual, "train/loss"),
}


def _differ(run, usual, name):
    return column(run, name) != column(usual, name)


@pytest.mark.parametrize("typed", sampled(TAKES_EFFECT, 6, guarantee=True))
def test_a_typed_setting_takes_effect(typed, runs):
    usual, run_dir = runs.straight(of_example()), runs.new()
    runs.start(run_dir, of_example(), "single", typed)
    assert TAKES_EFFECT[typed](run_dir, usual)


@pytest.mark.guarantee
def test_a_setting_that_nothing_reads_is_named(runs):
    """This module builds its model, optimizer and schedule itself."""
    typed = ("optimizer.lr=0.5", "scheduler.warmup=3")
    ended = runs.start(runs.new(), of_user("Plain"), "single", *typed)
    assert "Plain does not take the groups model, optimizer, scheduler: they are not used" in (
        ended.output
    )
    for key in ("model.bias", "task.rate", "data.rate"):
        run_dir = runs.new()
        ended = runs.start(run_dir, of_user("Plain"), "single", f"{key}=3", expect=2)
        assert key in ended.output
        assert not run_dir.exists()


AT_A_RESUME = [
    "optimizer.lr=0.125",
    "optimizer.weight_decay=30",
    "optimizer.betas=[0.5,0.6]",
    "scheduler.final=0.7",
    "trainer.gradient_clip_val=1e-8",
    "trainer.max_steps=7",
    "data.global_batch_size=12",
    "data.noise=0.5",
    "model.width=24",
    "seed=1",
]


@pytest.mark.parametrize("typed", sampled(AT_A_RESUME, 5, guarantee=True))
def test_a_setting_typed_at_a_resume_takes_effect_or_is_named(typed, runs):
    run_dir, key = runs.new(), typed.partition("=")[0]
    runs.start(run_dir, of_example(), "single", signal_at([4]), expect=143)
    ended = runs.start(run_dir, of_example(), "single", typed, expect=None)
    if ended.codes == [2] or key in ended.output:
        assert key in ended.output
    else:
        assert ended.codes == [0], ended.output[-2000:]
        usual = runs.straight(of_example())
        changed = [name for name in ("train/loss", "lr") if _differ(run_dir, usual, name)]
        assert changed or len(rows(run_dir)) == 7
