"""Our Trainer in place of Lightning's, with Lightning's own strategies, checkpoints and loops."""

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from armature.training.trainer import Trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*many workers.*"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
    pytest.mark.filterwarnings(
        "ignore:Be aware that when using `ckpt_path`, callbacks used to create"
    ),
]
EPOCH = 4  # batches


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.steps = nn.Linear(2, 1), []

    def training_step(self, batch, batch_idx):
        self.steps.append((self.current_epoch, self.global_step, batch_idx))
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Sampler(DistributedSampler):
    """Notes the epochs whose order it is asked for."""

    def __init__(self) -> None:
        super().__init__(range(EPOCH), num_replicas=1, rank=0)
        self.epochs: list[int] = []

    def set_epoch(self, epoch):
        super().set_epoch(epoch)
        self.epochs.append(epoch)


def make(trainer, *callbacks, **kwargs):
    saves = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    return trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=saves, callbacks=[*callbacks], **kwargs,
    )  # fmt: skip


@pytest.mark.parametrize(
    "limit",
    [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 3 * EPOCH}],
    ids=["epochs", "steps"],
)
@pytest.mark.parametrize("saved", [L.Trainer, Trainer], ids=["lightnings", "ours"])
def test_a_run_resumed_in_a_later_epoch_counts_on(tmp_path, limit, saved):
    data = torch.ones(EPOCH, 2)
    save = ModelCheckpoint(
        dirpath=tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1
    )
    make(saved, save, **limit).fit(Module(), DataLoader(data))
    for step in (6, 8):  # inside an epoch, and at its end
        seen = []
        for kind in (L.Trainer, Trainer):
            module, trainer, sampler = Module(), make(kind, **limit), Sampler()
            trainer.fit(
                module, DataLoader(data, sampler=sampler), ckpt_path=tmp_path / f"step={step}.ckpt"
            )
            seen.append(
                (module.steps, sampler.epochs, trainer.fit_loop.epoch_progress.state_dict())
            )
        assert seen[1] == seen[0]
        assert seen[1][0][0] == (step // EPOCH, step, step % EPOCH)
        assert len(seen[1][0]) == 3 * EPOCH - step


def test_a_step_that_empties_its_batch_leaves_the_loader_s_as_it_is():
    class Popping(Module):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch.pop("x"), batch_idx)

    module, batches = Popping(), [{"x": torch.ones(1, 2)}, {"x": torch.zeros(1, 2)}]
    make(Trainer, max_epochs=2).fit(
        module, DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)
    )
    assert len(module.steps) == 4
    assert all(batch.keys() == {"x"} for batch in batches)


class Computed(L.Callback):
    """Has a hook that no class and no instance defines."""

    called = 0

    def __getattribute__(self, name):
        return self.count if name == "on_before_backward" else super().__getattribute__(name)

    def count(self, trainer, module, loss):
        self.called += 1


def test_hooks_are_looked_up_as_attributes():
    class Computing(Module):
        called = 0

        def __getattribute__(self, name):
            return self.count if name == "on_train_batch_start" else super().__getattribute__(name)

        def count(self, batch, batch_idx):
            self.called += 1

    module, callback = Computing(), Computed()
    make(Trainer, callback, max_epochs=1).fit(module, DataLoader(torch.ones(EPOCH, 2)))
    assert (module.called, callback.called) == (EPOCH, EPOCH)


@pytest.mark.slow
def test_a_trial_of_the_tuner_does_not_validate():
    class Validating(Module):
        lr = batch_size = 1

        def train_dataloader(self):
            return DataLoader(torch.ones(64, 2), batch_size=self.batch_size)

        def val_dataloader(self):
            return DataLoader(torch.ones(2, 2))

        def validation_step(self, batch, batch_idx):
            raise AssertionError

    Tuner(make(Trainer, max_epochs=1, limit_val_batches=0)).lr_find(Validating(), num_training=3)
    Tuner(make(Trainer, max_epochs=1, limit_val_batches=0)).scale_batch_size(
        Validating(), max_trials=1
    )
