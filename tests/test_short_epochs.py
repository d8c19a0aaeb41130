"""Epochs that are shorter than a step, and averages that begin late."""

import pytest

from tests import running
from tests.plain_parts import Line
from tests.plain_runs import LINE, column, stop_at

pytestmark = pytest.mark.slow


class Counts(Line):
    """Its test reads an attribute that the training has set."""

    def on_test_epoch_end(self):
        self.log("test/ended", self.ended, sync_dist=True)


TINY = (
    "task._target_=tests.test_short_epochs.Counts",
    "+data.count=10",
    "+data.batch_size=16",
    "trainer.max_epochs=6",
    "trainer.test_at_end=true",
)


@pytest.mark.parametrize("layout", ["single", pytest.param("ddp", marks=pytest.mark.guarantee)])
def test_an_epoch_shorter_than_a_step_has_its_own_end(layout, runs):
    run_dir, ended = runs.train(*TINY, layout=layout)
    assert "data.global_batch_size=16, but an epoch has 10 samples" in ended.output
    assert column(run_dir, "samples") == [10, 20, 30, 40, 50, 60]
    assert column(run_dir, "epochs_ended") == [1, 2, 3, 4, 5, 6]
    assert len(column(run_dir, "val/loss")) == 6
    assert column(run_dir, "test/val/loss")
    stopped, _ = runs.train(*TINY, stop_at(3), layout=layout, expect=143)
    for _ in range(2):
        runs.train(*TINY, stop_at(3), layout=layout, run_dir=stopped)
        assert running.rows(stopped) == running.rows(run_dir)
        assert running.summary(stopped)["metrics"] == running.summary(run_dir)["metrics"]
        (stopped / "summary.json").unlink()  # as after a kill within the test


@pytest.mark.guarantee
def test_samples_that_do_not_divide_among_ranks_are_refused(runs):
    _, ended = runs.train(*TINY, "data.batch_size=12", layout="ddp", ranks=3, expect=2)
    assert "data.global_batch_size=12, but an epoch has 10 samples, which do not" in ended.output
    assert "Type data.global_batch_size=9 data.micro_batch_size=auto." in ended.output


def test_validations_before_an_average_begins_judge_the_weights(runs):
    average = (
        "+callbacks.average={_target_:lightning.pytorch.callbacks.EMAWeightAveraging,decay:0.5,"
        "update_starting_at_step:6}"
    )
    command = (LINE, "trainer.val_every_n_steps=2")
    usual, _ = runs.train(*command)
    run_dir, _ = runs.train(*command, average)
    expected, found = (column(each, "val/weight") for each in (usual, run_dir))
    assert found[:3] == expected[:3]
    assert found[3] != expected[3]
    stopped, _ = runs.train(*command, average, stop_at(4), expect=143)
    judged = running.script(
        "evaluate.py",
        str(stopped),
        "--split",
        "val",
        "launch.allowed_packages=[armature,torch.nn,torch.optim,lightning.pytorch,tests]",
        cwd=runs.forks.cwd,
        PYTHONPATH=running.PYTHONPATH,
    )
    (weight,) = [line for line in judged.stdout.splitlines() if "val/weight" in line]
    assert float(weight.split()[-1]) == pytest.approx(expected[1], abs=1e-5)  # of step 4
    runs.train(*command, average, stop_at(4), run_dir=stopped)
    assert running.rows(stopped) == running.rows(run_dir)
