"""Attributes that no checkpoint holds are named after a resume that has lost them."""

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch import nn

from armature.training import attributes
from tests.data.test_data_module import NumbersData


class Loss:
    def __init__(self) -> None:
        self.center, self.owner = torch.zeros(2), [self]


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(1)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), Noise())
        self.norms, self.seen, self.best = [1.0], {"b", "a", "c"}, {"x": (1, None)}
        self.queue, self.generator, self.python = deque([1], maxlen=3), torch.Generator(), random.Random(0)
        self.criterion, self.large, self.output = Loss(), torch.zeros(2_000_000), torch.zeros(1)


class Counts(L.Callback):
    bad = 0


class Slow(torch.optim.SGD):
    steps = 0


def trainer_of(module: Any, *callbacks: Any) -> Any:
    optimizers = [Slow(module.parameters(), lr=0.1)]
    return SimpleNamespace(
        lightning_module=module, callbacks=callbacks, optimizers=optimizers, datamodule=NumbersData()
    )


def change_norms(trainer):
    trainer.lightning_module.norms.append(2.0)


def draw_in_layer(trainer):
    trainer.lightning_module.net[1].rng.random()


def draw(trainer):
    torch.rand(1, generator=trainer.lightning_module.generator)
    trainer.lightning_module.python.random()


def move_center(trainer):
    trainer.lightning_module.criterion.center += 1


def count(trainer):
    trainer.callbacks[0].bad += 1
    trainer.optimizers[0].steps += 1
    trainer.datamodule.difficulty = 3


def keep_output(trainer):
    trainer.lightning_module.output = trainer.lightning_module.net[0](torch.ones(1, 2))
    trainer.lightning_module.large += 1
    trainer.lightning_module.forward = trainer.lightning_module.net.forward  # as torch's DDP does
    trainer.datamodule.samples_seen = 8  # a checkpoint holds it


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (change_norms, "Module.norms."),
        (draw_in_layer, "Module.net.1.rng."),
        (draw, "Module.generator, Module.python."),
        (move_center, "Module.criterion."),
        (count, "Counts.bad, NumbersData.difficulty, Slow.steps."),
        (keep_output, None),
        (lambda trainer: None, None),
    ],
)
def test_attributes_that_changed_before_the_save_are_named(caplog, change, names):
    saving, resumed = (trainer_of(Module(), Counts()) for _ in range(2))
    began = attributes.digests(saving)
    assert attributes.changed(saving, began) == attributes.changed(saving, None) == {}
    change(saving)
    attributes.warn_of_lost(resumed, attributes.changed(saving, began))
    assert (names is None) == (not caplog.records)
    if names is not None:
        assert f"when the checkpoint was saved: {names} No checkpoint holds" in caplog.text


def test_a_checkpoint_of_an_older_version_names_none(caplog):
    attributes.warn_of_lost(trainer_of(Module()), {})
    assert not caplog.records


def test_long_lists_are_not_compared():
    module = Module()
    module.paths, module.rows = ["a.png"] * 5_000, ["a.png"] * 50_000
    assert "Module.paths" in attributes.digests(trainer_of(module))
    assert "Module.rows" not in attributes.digests(trainer_of(module))
