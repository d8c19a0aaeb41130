"""evaluate.py, predict.py and convert.py agree with what the run itself measured."""

import csv

import pytest
import torch
import torch.nn.functional as F

from tests.guarantees import users
from tests.guarantees.runs import PACKAGES, of_user, rows

pytestmark = [pytest.mark.guarantee, pytest.mark.slow]
COMMAND = of_user("Normalized")
PLAIN = of_user("Plain")


@pytest.fixture(scope="module")
def run_dir(runs):
    """A run under fsdp, so that its checkpoint is a sharded one."""
    return runs.straight(COMMAND, "fsdp 2")


def rows_of(begin):
    dataset = users.Rows(begin, users.HELD_OUT)
    return [torch.stack([dataset[i][k] for i in range(len(dataset))]) for k in (1, 2)]


@pytest.mark.parametrize(("user", "layout"), [("Normalized", "fsdp 2"), ("Counting", "single")])
def test_evaluate_measures_what_the_run_measured(user, layout, runs):
    """Also of weights on two ranks, and with attributes that training has changed."""
    run_dir = runs.straight(of_user(user), layout)
    printed = runs.script("evaluate.py", str(run_dir), "--split", "val", PACKAGES)
    assert f"{float(rows(run_dir)[-1]['val/loss']):.6f}" in printed
    assert f"on {users.HELD_OUT} samples of val:" in printed


def test_converted_weights_compute_what_the_run_measured(run_dir, runs):
    """Without any code of ours: a LightningModule that loads a file of Lightning's form."""
    file = run_dir / "mine.ckpt"
    runs.script("convert.py", str(run_dir), str(file))
    module = users.Normalized.load_from_checkpoint(file, weights_only=True).eval()
    x, y = rows_of(1000)
    with torch.no_grad():
        loss = float(F.mse_loss(module(x), y))
    assert loss == pytest.approx(float(rows(run_dir)[-1]["val/loss"]), rel=1e-5)


def test_predictions_are_those_of_the_weights_on_any_number_of_processes(run_dir, runs):
    module = users.Normalized()
    module.load_state_dict(runs.weights(run_dir))
    x, _ = rows_of(2000)
    expected = module.eval()(x)[:, 0].tolist()
    for devices in (1, 2):
        file = run_dir / f"rows-{devices}.csv"
        words = (f"out={file}", f"trainer.devices={devices}", PACKAGES)
        runs.script("predict.py", str(run_dir), *words)
        with file.open(newline="") as stream:
            found = list(csv.DictReader(stream))
        assert [int(row["id"]) for row in found] == list(range(2000, 2000 + users.HELD_OUT))
        assert [float(row["value"]) for row in found] == pytest.approx(expected, rel=1e-5)


def test_a_run_that_begins_with_converted_weights_measures_the_same(runs):
    """Its first validation follows a step that moves nothing."""
    run_dir = runs.straight(PLAIN)
    begin = run_dir.parent / "converted" / "checkpoints" / "step=000000"
    runs.script("convert.py", str(run_dir), str(run_dir / "again.ckpt"))
    runs.script("convert.py", str(run_dir / "again.ckpt"), str(begin))
    other = runs.new()
    still = ("trainer.max_steps=1", "trainer.gradient_clip_val=1e-12")
    runs.start(other, PLAIN, "ddp 2", f"resume={begin}", *still)
    value = float(rows(run_dir)[-1]["val/loss"])
    assert float(rows(other)[-1]["val/loss"]) == pytest.approx(value, rel=1e-5)
