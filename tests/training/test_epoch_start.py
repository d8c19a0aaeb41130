"""What happens when `on_train_epoch_start` is called again after a resume inside an epoch."""

import random
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from torch import nn

from armature.training import epoch_start


class Hooked(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.alpha, self.logged = 1.0, []

    def log(self, name, *args, **kwargs):  # pyright: ignore[reportIncompatibleMethodOverride]
        self.logged.append(name)

    def on_train_epoch_start(self):
        self.alpha = 0.5
        self.log("alpha", self.alpha)
        logger: Any = self.logger
        logger.experiment.add_scalar("alpha", 1)
        torch.rand(3)


class Fails(L.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        raise RuntimeError("only once")


class Stub:
    """As much of a Trainer as is used."""

    def __init__(self, module: Any, *callbacks: L.Callback) -> None:
        self.lightning_module, self.callbacks = module, [*callbacks]
        self.loggers: list[Any] = [SimpleNamespace()]  # the user's, which must not be used
        module._trainer = self

    @property
    def logger(self) -> Any:
        return self.loggers[0]


class LogsFirst(L.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        self.log("rate", 1.0)
        self.begun = True


def test_attributes_are_set_again_and_nothing_is_logged_or_drawn():
    module, callback = Hooked(), LogsFirst()
    own: Any = module.log
    callback.log = own  # as Lightning sets it
    trainer = Stub(module, callback)
    loggers, drawn = trainer.loggers, torch.get_rng_state()
    epoch_start.repeat(trainer, None)
    assert (module.alpha, module.logged, trainer.loggers) == (0.5, [], loggers)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert (callback.begun, callback.log) == (True, own)
    module.log("alpha", 1.0)  # silent no longer
    assert module.logged == ["alpha"]


class Draws(L.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        self.drawn = random.random(), np.random.rand(), torch.rand(()).item()


def test_the_same_is_drawn_again_and_training_draws_what_it_would_have_drawn():
    callback = Draws()
    trainer: Any = Stub(Hooked(), callback)
    at_start = epoch_start.random_state(trainer)
    callback.on_train_epoch_start(trainer, None)
    first = callback.drawn
    torch.rand(5)
    later = torch.get_rng_state()

    epoch_start.repeat(trainer, at_start)

    assert callback.drawn == first
    assert torch.equal(torch.get_rng_state(), later)


def test_a_hook_that_cannot_be_called_again_is_named(caplog):
    epoch_start.repeat(Stub(Hooked(), Fails()), None)
    assert "Fails.on_train_epoch_start failed when it was called again" in caplog.text
