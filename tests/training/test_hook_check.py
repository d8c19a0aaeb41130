"""Hooks that cannot be called as they will be are refused before training."""

import functools

import lightning.pytorch as L
import pytest

from armature.errors import ConfigError
from armature.training import hook_check


def module(**methods):
    return type("Mine", (L.LightningModule,), methods)()


def unpacked_by(function):
    @functools.wraps(function)
    def hook(self, batch, batch_idx):
        return function(self, *batch, batch_idx)

    return hook


@unpacked_by
def unpacked(self, x, y, batch_idx):
    return 0


FITTING = {
    "training_step": [
        lambda s, batch: 0,
        lambda s, batch, batch_idx: 0,
        lambda s, *args: 0,
        lambda s, *a, **k: 0,
    ],
    "validation_step": [
        lambda s, batch, batch_idx, dataloader_idx: 0,
        lambda s, b, i=0, loader=0: 0,
    ],
    "setup": [lambda s, stage: 0, lambda s, stage=None: 0, lambda s, **kwargs: 0],
    "on_validation_batch_end": [
        lambda s, outputs, batch, batch_idx: 0,
        lambda s, o, b, i, dataloader_idx=0: 0,
        lambda s, o, b, i, dataloader_idx: 0,  # of several loaders
    ],
    "on_train_batch_start": [unpacked],
    "configure_gradient_clipping": [
        lambda s, o, gradient_clip_val, gradient_clip_algorithm=None: 0
    ],
    "optimizer_step": [
        lambda s, epoch, batch_idx, optimizer, optimizer_closure: 0,
        lambda s, *args: 0,
    ],
    "on_train_epoch_end": [lambda s: 0, lambda s, unused=None: 0],
    "backward": [lambda s, loss, *args, **kwargs: 0],
}
REFUSED = {
    "training_step": (
        lambda s: 0,
        r"Mine\.training_step\(\): it is called with \(batch, batch_idx\)\. Define it as",
    ),
    "validation_step": (lambda s, a, b, c, d: 0, r"called with \(batch, batch_idx\)"),
    "test_step": (lambda s: 0, r"def test_step\(self, batch, batch_idx\)"),
    "setup": (lambda s: 0, r"called with \(stage\)"),
    "on_validation_epoch_end": (
        lambda s, outputs: 0,
        r"def on_validation_epoch_end\(self\)",
    ),
    "on_before_optimizer_step": (
        lambda s, optimizer, optimizer_idx: 0,
        r"called with \(optimizer\)",
    ),
    "on_train_batch_end": (
        lambda s, outputs, batch: 0,
        r"called with \(outputs, batch, batch_idx\)\. Define",
    ),
}


@pytest.mark.parametrize(
    ("name", "hook"), [(name, hook) for name, hooks in FITTING.items() for hook in hooks]
)
def test_a_hook_that_can_be_called_passes(name, hook):
    hook_check.check(module(**{name: hook}), base=L.LightningModule)


@pytest.mark.parametrize("name", REFUSED)
def test_a_hook_that_cannot_be_called_is_refused(name):
    hook, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        hook_check.check(module(**{name: hook}), base=L.LightningModule)


def test_callbacks_and_data_modules_are_checked_as_well():
    callback = type("Mine", (L.Callback,), {"on_train_epoch_end": lambda self, trainer: 0})()
    with pytest.raises(ConfigError, match=r"called with \(trainer, pl_module\)"):
        hook_check.check(callback, base=L.Callback)
    data = type("Mine", (L.LightningDataModule,), {"setup": lambda self: 0})()
    with pytest.raises(ConfigError, match=r"Mine\.setup\(\): it is called with \(stage\)"):
        hook_check.check(data, base=L.LightningDataModule)


def test_lightnings_own_classes_pass():
    for callback in (
        L.callbacks.EarlyStopping("x"),
        L.callbacks.ModelCheckpoint(),
        L.callbacks.LearningRateMonitor(),
    ):
        hook_check.check(callback, base=L.Callback)
