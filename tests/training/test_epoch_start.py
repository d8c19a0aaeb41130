"""What `on_train_epoch_start` may change when it is called again after a resume inside an epoch."""

import random
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn

from armature.training import epoch_start


class Hooked(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.alpha, self.epochs, self.logged = 1.0, 0, []

    def log(self, name, *args, **kwargs):  # pyright: ignore[reportIncompatibleMethodOverride]
        self.logged.append(name)

    def on_train_epoch_start(self):
        self.alpha, self.epochs = 0.5, self.epochs + 1
        self.log("alpha", self.alpha)
        self.net.requires_grad_(False)
        with torch.no_grad():
            self.net.weight.zero_()
        optimizer = self.trainer.optimizers[0]
        optimizer.param_groups[0]["lr"] = 7.0
        optimizer.add_param_group({"params": [*self.net.parameters()]})  # a second time
        optimizer.state.clear()
        logger: Any = self.logger
        logger.experiment.add_scalar("alpha", 1)
        torch.rand(3)

    def on_load_checkpoint(self, checkpoint):
        self.epochs = checkpoint["epochs"]


class Schedules(L.Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module):
        trainer.lr_scheduler_configs[0].scheduler.step()
        self.epoch = "known"


class Fails(L.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        raise RuntimeError("only once")


class Stub:
    """As much of a Trainer as is used."""

    def __init__(self, module: Any, *callbacks: L.Callback) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        optimizer.state[module.net.weight] = {"momentum_buffer": torch.ones(2, 2)}
        self.lightning_module, self.callbacks, self.optimizers = module, [*callbacks], [optimizer]
        self.lr_scheduler_configs = [
            SimpleNamespace(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))
        ]
        self.strategy = SimpleNamespace(_lightning_optimizers=[])
        self.loggers: list[Any] = [SimpleNamespace()]  # the user's, which must not be used
        module._trainer = self

    @property
    def logger(self) -> Any:
        return self.loggers[0]


def test_attributes_are_set_again_and_what_the_checkpoint_holds_stays():
    module, callback = Hooked(), Schedules()
    trainer = Stub(module, callback)
    (optimizer,), loggers = trainer.optimizers, trainer.loggers
    groups, schedule = (
        str(optimizer.param_groups),
        trainer.lr_scheduler_configs[0].scheduler.state_dict(),
    )
    watch = epoch_start.SavedAttributes(trainer, {})
    module.on_load_checkpoint({"epochs": 4})
    weights = epoch_start.copy_weights(trainer, (epoch_start.HOOK,))
    drawn = torch.get_rng_state()
    expected = {name: value.clone() for name, value in module.state_dict().items()}

    epoch_start.repeat(trainer, watch.find())
    epoch_start.put_back(module, weights)

    assert (module.alpha, callback.epoch) == (0.5, "known")
    assert (module.epochs, module.logged, trainer.loggers) == (4, [], loggers)
    assert str(optimizer.param_groups) == groups
    assert trainer.lr_scheduler_configs[0].scheduler.state_dict() == schedule
    assert list(optimizer.state) == [module.net.weight]
    assert module.net.weight.requires_grad
    torch.testing.assert_close(module.state_dict(), expected, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), drawn)
    module.log("alpha", 1.0)  # silent no longer
    assert module.logged == ["alpha"]
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [*module.parameters()]})


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

    epoch_start.repeat(trainer, [], at_start)

    assert callback.drawn == first
    assert torch.equal(torch.get_rng_state(), later)


def test_nothing_is_kept_of_a_run_without_such_hooks():
    class Plain(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 2)

    assert epoch_start.random_state(Stub(Plain())) is None


def test_a_hook_that_cannot_be_called_again_is_named(caplog):
    epoch_start.repeat(Stub(Hooked(), Fails()), [])
    assert "Fails.on_train_epoch_start failed when it was called again" in caplog.text


class LogsFirst(L.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        self.log("rate", 1.0)
        self.begun = True


def test_callbacks_log_nothing_either():
    """Lightning sets the module's `log` on them."""
    module, callback = Hooked(), LogsFirst()
    own: Any = module.log
    callback.log = own
    epoch_start.repeat(Stub(module, callback), [])
    assert module.logged == []
    assert (callback.begun, callback.log) == (True, own)


class Counts(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.stage = 0

    def load_state_dict(self, state_dict):
        self.stage = state_dict["stage"]


class Shared(L.Callback):
    """Saves a flag that each epoch turns, and a list that another object also has; changes what
    others save.
    """

    def __init__(self, items: list[int]) -> None:
        self.flag, self.items, self.again = False, items, 0

    def on_train_epoch_start(self, trainer, pl_module):
        self.flag = not self.flag
        self.again += 1
        trainer.datamodule.stage += 1
        pl_module.epochs += 1
        trainer.callbacks[1].count += 1

    def load_state_dict(self, state_dict):
        self.flag, self.items[:] = state_dict["flag"], state_dict["items"]


class Patience(L.Callback):
    count = 0

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.count = checkpoint["mine"]["count"]


def test_what_any_object_has_restored_stays():
    items: list[int] = []
    module, shared, patience, data = Hooked(), Shared(items), Patience(), Counts()
    trainer: Any = Stub(module, shared, patience)
    trainer.datamodule = data
    shared.log = module.log  # as Lightning does
    checkpoint = {
        "epochs": 0,
        "hyper_parameters": {"alpha": 1.0},
        "mine": {"count": 3},
        "Counts": {"stage": 0},
        "callbacks": {"Shared": {"flag": False, "items": [1]}},
    }
    watch = epoch_start.SavedAttributes(trainer, checkpoint)
    module.on_load_checkpoint(checkpoint)
    data.load_state_dict(checkpoint["Counts"])
    shared.load_state_dict(checkpoint["callbacks"]["Shared"])
    patience.on_load_checkpoint(trainer, module, checkpoint)

    epoch_start.repeat(trainer, watch.find())

    assert (shared.flag, data.stage, module.epochs, patience.count) == (False, 0, 0, 3)
    assert shared.items is items
    assert (shared.again, module.alpha) == (1, 0.5)  # no checkpoint holds them


def test_hooks_of_lightning_are_not_called_again():
    class Finetunes(BackboneFinetuning):
        pass

    trainer = Stub(Hooked(), Finetunes())
    assert [owner for owner, _ in epoch_start.users_hooks(trainer, epoch_start.HOOK)] == [
        trainer.lightning_module
    ]


def test_the_mode_of_each_module_is_kept():
    module = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Dropout()))
    module[1].eval()
    saved = epoch_start.in_eval(module)
    assert saved == ["1", "1.0"]
    module.train()
    epoch_start.set_modes(module, saved)
    assert epoch_start.in_eval(module) == saved
    assert module.training
