"""A Trainer built by hand, without a configuration, does what Lightning's does."""

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from armature.training.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*many workers.*", "ignore:.*not resumable.*")


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen = torch.nn.Linear(4, 1), []

    def training_step(self, batch, batch_idx):
        self.seen.append(
            (self.current_epoch, self.trainer.fit_loop.epoch_progress.current.processed, batch_idx)
        )
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make(trainer, *callbacks, **kwargs):
    return trainer(
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        callbacks=[*callbacks],
        **kwargs,
    )


def loader() -> DataLoader:
    return DataLoader(torch.randn(16, 4), batch_size=4)


class Saves(L.Callback):
    def __init__(self, step, path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    "limits", [{"max_epochs": 4}, {"max_steps": 15}, {"max_epochs": 4, "max_steps": 100}]
)
@pytest.mark.parametrize("step", [6, 8])
def test_a_resumed_run_counts_epochs_as_lightning_s_does(limits, step, tmp_path):
    counted = []
    for trainer in (L.Trainer, Trainer):
        path = tmp_path / f"{trainer.__module__}.ckpt"
        make(trainer, Saves(step, path), max_epochs=3).fit(Module(), loader())
        module, resumed = Module(), make(trainer, **limits)
        resumed.fit(module, loader(), ckpt_path=path)
        counted.append((module.seen, resumed.current_epoch, resumed.global_step))
    assert counted[0] == counted[1]
    assert counted[1][0][0][0] > 0  # not from the first epoch


def loops(trainer, *, epochs: bool) -> None:
    """Put a loop of Lightning's in the place of ours."""
    if epochs:
        loop = _FitLoop(trainer, min_epochs=trainer.min_epochs, max_epochs=trainer.max_epochs)
        loop.epoch_loop, trainer.fit_loop = trainer.fit_loop.epoch_loop, loop
    else:
        trainer.fit_loop.epoch_loop = _TrainingEpochLoop(
            trainer, trainer.min_steps, trainer.max_steps
        )


@pytest.mark.parametrize("epochs", [True, False])
def test_a_loop_may_be_replaced(epochs):
    module, trainer = Module(), make(Trainer, max_epochs=2)
    loops(trainer, epochs=epochs)
    trainer.fit(module, loader())
    assert (len(module.seen), trainer.completed_batches, trainer.max_steps) == (8, 8, -1)
    assert trainer.begins_random_streams is not epochs


class Tuned(Module):
    lr = 0.1

    def validation_step(self, batch, batch_idx):
        self.seen.append("validated")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def test_a_tuner_s_trials_do_not_end_with_a_validation():
    seen = []
    for trainer in (L.Trainer, Trainer):
        module = Tuned()
        Tuner(make(trainer, max_epochs=1)).lr_find(
            module, loader(), loader(), num_training=6, early_stop_threshold=None
        )
        seen.append(module.seen)
    assert seen[0] == seen[1]
    assert "validated" in seen[1]  # at the end of the first epoch
