"""Mistakes in users' classes end in one message that says what to write, under our strategies."""

import os
from types import SimpleNamespace

import lightning.pytorch as L
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import DataLoader

from armature.errors import ConfigError
from armature.strategies.single import SingleDevice
from armature.training.errors import RecordError, refusal_of
from armature.training.process import quiet
from armature.training.trainer import Trainer


class Mine(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(**methods):
    module = type("Mine", (Mine,), methods)()
    trainer = Trainer(
        strategy=SingleDevice(),
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    quiet()  # pytest takes its filters back
    try:
        trainer.fit(module, DataLoader(torch.ones(4, 4), batch_size=2))
    except Exception as error:
        refused = refusal_of(error, module) or error
        assert isinstance(refused, ConfigError), repr(refused)
        return str(refused)
    return ""


def frozen(self):
    Mine.__init__(self)
    self.requires_grad_(False)


def by_hand(self):
    Mine.__init__(self)
    self.automatic_optimization = False


def two(self):
    return [one(self), one(self)]


def one(self):
    return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (
            {"training_step": lambda s, b: s.net(b).mean().detach()},
            "Mine: training_step returned a loss without a",
        ),
        (
            {"training_step": lambda s, b: s.net(b)},
            r"a loss of shape (2, 1). Return one number, such as loss.mean()",
        ),
        ({"__init__": frozen}, "All parameters of the module are frozen"),
        (
            {"configure_optimizers": lambda s: "adam"},
            "Mine: Unknown configuration for model optimizers",
        ),
        (
            {"configure_optimizers": two},
            "Mine: Training with multiple optimizers is only supported",
        ),
        (
            {"configure_optimizers": lambda s: []},
            "Mine.configure_optimizers returned no optimizer. Return one; or",
        ),
        (
            {
                "val_dataloader": lambda s: DataLoader(torch.ones(4, 4)),
                "validation_step": lambda s, batch, batch_idx, dataloader_idx: None,
                "training_step": lambda s, b: pytest.fail("training had begun"),
            },
            "Either remove the argument or give it a default value i.e. `dataloader_idx=0`",
        ),
        (
            {"training_epoch_end": lambda s, outputs: 0},
            "Support for `training_epoch_end` has been removed",
        ),
        ({"training_step": lambda s, b: s.log("x", b)}, "the tensor must have a single element"),
        (
            {
                "__init__": by_hand,
                "training_step": lambda s, b: s.manual_backward(s.net(b).sum().detach()),
            },
            "manual_backward was given a loss without a gradient",
        ),
    ],
)
def test_a_mistake_is_named(methods, message):
    assert message in fit(**methods)


def test_a_backward_of_the_modules_own_and_a_gradient_that_is_given_may_begin_anywhere():
    assert (
        fit(backward=lambda s, loss: None, training_step=lambda s, b: s.net(b).mean().detach())
        == ""
    )

    def step(self, batch):
        out = self.net(batch)
        self.manual_backward(out, gradient=torch.ones_like(out))

    def positional(self, batch):
        out = self.net(batch)
        self.manual_backward(out, torch.ones_like(out))

    assert (
        fit(__init__=by_hand, training_step=step)
        == fit(__init__=by_hand, training_step=positional)
        == ""
    )


def test_an_error_of_the_users_code_is_left_to_its_traceback():
    def step(self, batch):
        return self.net(batch.T)

    module = type("Mine", (Mine,), {"training_step": step})()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        module.training_step(torch.ones(3, 4))
    assert refusal_of(caught.value, module) is None


class Ends(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        os._exit(1)


def test_a_process_of_the_data_that_has_ended_is_named():
    loader = torch.utils.data.DataLoader(Ends(), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError) as info:
        next(iter(loader))
    trainer = SimpleNamespace(strategy=SingleDevice())
    RecordError(OmegaConf.create({})).on_exception(trainer, Mine(), info.value)
    assert "data.num_workers=0 to load in the training process" in str(info.value.__notes__)
    assert refusal_of(info.value, Mine()) is None  # a restart may find more memory


def test_a_module_that_trains_by_hand_may_have_no_optimizer():
    assert fit(__init__=by_hand, configure_optimizers=lambda s: []) == ""
