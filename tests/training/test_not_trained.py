"""Training that changes no weight is named."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from armature.training.not_trained import NotTrained


def trainer(*, automatic: bool, max_steps: int = 1000, global_step: int = 0):
    module = SimpleNamespace(automatic_optimization=automatic)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    return SimpleNamespace(
        lightning_module=module, optimizers=[optimizer], is_global_zero=True, max_steps=max_steps,
        global_step=global_step,
    )  # fmt: skip


def said(caplog, made, rows, *, step=False) -> str:
    caplog.clear()
    watch = NotTrained()
    watch.begin(made)
    if step:
        made.optimizers[0].step()
    for part in rows:
        watch.look(made, part)
    return caplog.text


@pytest.mark.parametrize(
    ("row", "warns"),
    [
        ({"step": 1, "train/loss": 2.0, "train/grad_norm": 0.0}, True),
        ({"step": 1, "train/loss": 2.0, "train/grad_norm": 1e-9}, False),
        ({"step": 2, "train/loss": 2.0, "train/grad_norm": 0.0}, False),
        ({"step": 1, "train/grad_norm": 0.0}, False),  # training_step returned None
        ({"step": 1, "train/loss": 2.0}, False),
    ],
)
def test_a_first_gradient_of_0_is_named(row, warns, caplog):
    assert (
        "the gradient of the first step is 0" in said(caplog, trainer(automatic=True), [[row]])
    ) == warns


def test_manual_optimization_without_a_step_is_named_once(caplog):
    rows = [[{"step": first + i} for i in range(60)] for first in (1, 61, 121)]
    assert (
        said(caplog, trainer(automatic=False), rows).count(
            "no optimizer has made a step in 120 global batches"
        )
        == 1
    )
    assert said(caplog, trainer(automatic=False, max_steps=7), [[{"step": i} for i in range(1, 8)]])
    assert not said(caplog, trainer(automatic=False, global_step=3), rows)
    assert not said(caplog, trainer(automatic=False), rows, step=True)  # of the optimizer itself
