"""experiment=gpt2_124m with everything but its sizes: it trains, on the schedule that its file
describes.
"""

import pytest

from tests import running

SMALL = [
    "experiment=gpt2_124m",
    "model.width=32",
    "model.layers=2",
    "model.heads=2",
    "model.ffn_hidden=64",
    "data.context=16",
    "data.global_batch_size=8",
    "data.micro_batch_size=4",
    "data.eval_batch_size=8",
    "data.source.val_fraction=0.1",
    "data.source.test_fraction=0.1",
    "trainer.accelerator=cpu",
    "trainer.max_steps=10",
    "trainer.limit_val_batches=2",
    "trainer.limit_test_batches=2",
    "logger=none",
    "task.preview_tokens=4",
    "run.name=gpt2",
]


@pytest.mark.slow
def test_the_experiment_trains_at_a_fraction_of_its_size(tmp_path):
    corpus = running.write_corpus(tmp_path / "text")
    layout = ("strategy=fsdp", "trainer.devices=2")
    running.call("train.py", *SMALL, f"data.path={corpus}", *layout, cwd=tmp_path, ranks=2)
    rows = running.rows(tmp_path / "outputs" / "gpt2")
    rates = [float(row["lr"]) for row in rows]
    assert rates[2:8] == [1.8e-3] * 6  # warmed up, and stable
    assert rates[8:] == pytest.approx([1.8e-3 * 2 / 3, 1.8e-3 / 3])
    losses = running.losses(tmp_path / "outputs" / "gpt2")
    assert losses[0] == pytest.approx(10.8, abs=0.3)  # of 50,304 words, all about as likely
    assert losses[-1] < losses[0] - 0.5
