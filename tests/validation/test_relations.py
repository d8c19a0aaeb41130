"""Monitored metrics are compared with those that our tasks log."""

import pytest

from armature.validation import relations

TASK = {"_target_": "armature.tasks.image_classification.ImageClassification"}
STOPPING = "lightning.pytorch.callbacks.EarlyStopping"


def found(monitor, **callbacks):
    return [
        *relations._monitors(
            {"task": TASK, "callbacks": callbacks, "checkpoint": {"monitor": monitor}}
        )
    ]


@pytest.mark.parametrize("name", ["val/accuracy", "train/loss", "lr", "test/accuracy"])
def test_logged_metrics_may_be_monitored_those_of_the_test_by_a_sweep(name):
    assert found(name) == []


def test_a_metric_that_no_task_logs_is_refused():
    (problem,) = found("test/accurcy")
    assert problem.endswith("Did you mean checkpoint.monitor=test/accuracy?")
    (problem,) = found("val/loss", stop={"_target_": STOPPING, "monitor": "test/loss"})
    assert problem.startswith("callbacks.stop.monitor=test/loss: ")
    assert found("anything", mine={"_target_": "mine.Callback"}) == []  # which may log it
