"""What Lightning refuses in a user's module, and the optimizers that it need not return."""

import pytest
import torch
from torch.utils.data import DataLoader

from armature.errors import ConfigError
from armature.training.errors import refusal_of
from armature.training.process import quiet
from tests.trainers import Squares, quiet_trainer


def fit(**methods):
    module = type("Mine", (Squares,), methods)()
    trainer = quiet_trainer(max_epochs=1)
    quiet()  # pytest takes its filters back
    trainer.fit(module, DataLoader(torch.ones(4, 4), batch_size=2))


def by_hand(self):
    Squares.__init__(self)
    self.automatic_optimization = False


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (
            {"configure_optimizers": lambda s: "adam"},
            "Squares: Unknown configuration for model optimizers",
        ),
        (
            {"training_epoch_end": lambda s, outputs: 0},
            "Support for `training_epoch_end` has been removed",
        ),
        ({"training_step": lambda s, b: s.log("x", b)}, "(x, tensor(…))` was called, but the"),
    ],
)
def test_what_lightning_refuses_is_one_message(methods, message):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        fit(**methods)
    assert message in str(refusal_of(caught.value, Squares()))


def test_automatic_optimization_needs_an_optimizer():
    with pytest.raises(ConfigError, match=r"Mine.configure_optimizers returned no optimizer"):
        fit(configure_optimizers=lambda s: [])


def test_a_module_that_trains_by_hand_may_have_no_optimizer():
    fit(__init__=by_hand, configure_optimizers=lambda s: [])
