"""Attributes that no checkpoint holds are named after a resume that has lost them."""

import enum
import queue
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchmetrics import MeanMetric

from armature.training import attributes
from tests.data.test_data_module import NumbersData


class Loss:
    def __init__(self) -> None:
        self.center, self.owner = torch.zeros(2), [self]


@dataclass(slots=True)
class Meter:
    count: int = 0
    path: PurePosixPath = field(default_factory=lambda: PurePosixPath("a"))


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Noise(nn.Module):
    draws: ClassVar[list[float]] = []

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(1)


class Module(L.LightningModule):
    losses: ClassVar[list[float]] = []

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), Noise(), nn.Dropout(0.1), nn.BatchNorm1d(2))
        self.norms, self.seen, self.best = [1.0], {"b", "a", "c"}, {"x": (1, None)}
        self.queue, self.generator, self.python = (
            deque([1], maxlen=3),
            torch.Generator(),
            random.Random(0),
        )
        self.jobs = queue.Queue()
        self.criterion, self.large, self.output = Loss(), torch.zeros(2_000_000), torch.zeros(1)


class Counts(L.Callback):
    bad = 0


class Slow(torch.optim.SGD):
    steps = 0


def trainer_of(module: Any, *callbacks: Any) -> Any:
    optimizers = [Slow(module.parameters(), lr=0.1)]
    return SimpleNamespace(
        lightning_module=module,
        callbacks=callbacks,
        optimizers=optimizers,
        datamodule=NumbersData(),
        lr_scheduler_configs=[],
        gradient_clip_val=1.0,
        limit_val_batches=1.0,
    )


def put_into_queue(trainer):
    trainer.lightning_module.jobs.put(1)


def change_norms(trainer):
    trainer.lightning_module.norms.append(2.0)


def draw_in_layer(trainer):
    trainer.lightning_module.net[1].rng.random()


def draw(trainer):
    torch.rand(1, generator=trainer.lightning_module.generator)
    trainer.lightning_module.python.random()


def move_center(trainer):
    trainer.lightning_module.criterion.center += 1


def set_layers(trainer):
    trainer.lightning_module.net[2].p += 0.1
    trainer.lightning_module.net[3].momentum = None
    trainer.lightning_module.net.eval()


def clip_later(trainer):
    trainer.gradient_clip_val, trainer.limit_val_batches = 0.05, 3


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
        (put_into_queue, "Module.jobs."),
        (draw_in_layer, "Module.net.1.rng."),
        (draw, "Module.generator, Module.python."),
        (move_center, "Module.criterion."),
        (set_layers, "Module.net.2.p, Module.net.3.momentum."),
        (clip_later, "Trainer.gradient_clip_val, Trainer.limit_val_batches."),
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


def test_parts_that_torch_shards_are_still_the_users():
    module = Module()
    trainer = trainer_of(module)
    before = attributes.digests(trainer)
    module.net[1].__class__ = type(
        "FSDPNoise", (FSDPModule, Noise), {"__module__": "torch.distributed.fsdp"}
    )
    assert attributes.changed(trainer, before) == {}
    draw_in_layer(trainer)
    assert attributes.changed(trainer, before).keys() == {"Module.net.1.rng"}


def batches(loader):
    while True:
        yield from loader


class Wraps:
    def __init__(self, loader):
        self.batches = batches(loader)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.batches)


class Point(NamedTuple):
    x: int


def test_a_checkpoint_of_an_older_version_names_none(caplog):
    attributes.warn_of_lost(trainer_of(Module()), {})
    assert not caplog.records


class Holds(L.Callback):
    """Objects whose attributes do not show their state."""

    def __init__(self, shared):
        self.metrics = {"mean": MeanMetric()}
        self.ema, self.shared = nn.Linear(2, 2), shared
        self.optimizer = torch.optim.SGD(self.ema.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            torch.optim.SGD(self.ema.parameters()), lambda step: 0.9**step
        )


def change_metric(trainer):
    trainer.callbacks[0].metrics["mean"].update(torch.tensor(2.0))


def change_copy(trainer):
    with torch.no_grad():
        trainer.callbacks[0].ema.weight += 1


def step_optimizer(trainer):
    held = trainer.callbacks[0]
    held.ema(torch.ones(1, 2)).sum().backward()
    held.optimizer.step()


def step_schedule(trainer):
    trainer.callbacks[0].schedule.last_epoch += 1


def change_saved(trainer):
    with torch.no_grad():
        trainer.callbacks[0].shared.weight += 1


def change_buffer(trainer):
    trainer.lightning_module.net[0].bank += 1


def keep_outputs(trainer):
    trainer.lightning_module.norms.append(trainer.lightning_module.net[0].weight.sum() * 2)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (change_metric, {"Holds.metrics"}), (change_copy, {"Holds.ema"}), (change_saved, set()),
        (step_optimizer, {"Holds.optimizer", "Holds.ema"}), (step_schedule, {"Holds.schedule"}),
        (change_buffer, {"Module.net.0.bank"}), (keep_outputs, {"Module.norms"}),
    ],
)  # fmt: skip
def test_state_that_attributes_hide_is_compared_unless_a_checkpoint_holds_it(change, names):
    torch.manual_seed(0)
    module = Module()
    module.net[0].register_buffer("bank", torch.zeros(2), persistent=False)
    module.net[0].register_buffer("edges", torch.eye(2).to_sparse(), persistent=False)
    module.net[0].register_buffer("none", None, persistent=False)
    trainer = trainer_of(module, Holds(module.net[0]))
    before = attributes.digests(trainer)
    change(trainer)
    assert attributes.changed(trainer, before).keys() == names
