"""A stop within a validation: what was replaced for it is put back before the checkpoint of the
stop is saved.
"""

import random
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric, MeanSquaredError, MetricTracker

from armature.training.epoch_metrics import metric_states
from armature.training.stop import StoppedBySignal
from tests.trainers import Squares, quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*many workers.*")


class Module(Squares):
    def __init__(self) -> None:
        super().__init__()
        self.best, self.history = MaxMetric(), []

    def on_validation_epoch_start(self):
        self.losses: list[Any] = []

    def validation_step(self, batch, batch_idx):
        self.losses.append(self.net(batch).square().mean())
        self.log("val/loss", self.losses[-1])

    def on_validation_epoch_end(self):
        self.best(torch.stack(self.losses).mean())
        self.history.append(len(self.losses))
        self.log("val/best", self.best.compute())


class Swaps(L.Callback):
    """An average of one's own, in another place and with other hooks than Lightning's."""

    def on_validation_start(self, trainer, pl_module):
        self.swap(pl_module)
        self.swapped = True

    def on_validation_end(self, trainer, pl_module):
        if self.swapped:
            self.swap(pl_module)
            self.swapped = False

    def on_exception(self, trainer, pl_module, exception):
        with torch.no_grad():
            self.on_validation_end(trainer, pl_module)

    def swap(self, pl_module):  # validation computes no gradients
        for weight, other in zip(pl_module.parameters(), self.others(pl_module), strict=True):
            kept = weight.clone()
            weight.copy_(other)
            other.copy_(kept)

    def others(self, pl_module):
        if not hasattr(self, "average"):
            self.average = [torch.zeros_like(weight) for weight in pl_module.parameters()]
        return self.average


class Fails(L.Callback):
    validations = 0

    def on_validation_start(self, trainer, pl_module):
        self.validations += 1

    def on_validation_end(self, trainer, pl_module):
        if self.validations == 2:
            raise KeyError("lost")


class Draws(Module):
    """Draws in validation_step, and counts its batches in a buffer, a metric object and an
    attribute.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("last", torch.zeros(1))
        self.error, self.batches, self.tracker = MeanMetric(), 0, MetricTracker(MeanSquaredError())

    def training_step(self, batch, batch_idx):
        self.error.update(batch)
        return super().training_step(batch + 0.1 * torch.randn_like(batch), batch_idx)

    def on_validation_epoch_start(self):
        super().on_validation_epoch_start()
        self.tracker.increment()

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch + torch.randn_like(batch), batch_idx)
        self.seen += random.random()
        self.last = self.seen * 2
        self.error(self.losses[-1])
        self.log("val/error", self.error)
        self.tracker.update(batch, batch)
        self.batches += 1

    def state(self):
        evaluated = self.trainer.fit_loop.epoch_loop.val_loop._results
        drawn = (torch.get_rng_state().tolist(), random.getstate(), self.tracker.n_steps)
        return (
            float(self.seen),
            float(self.last),
            str(metric_states(self, evaluated=evaluated)["error"]),  # as a checkpoint holds it
            self.batches,
            *drawn,
        )


class Watch(L.Callback):
    """Notes the weights before a validation, and stops in the second one."""

    validations = 0

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.weights = {name: value.clone() for name, value in pl_module.state_dict().items()}
        self.state = pl_module.state() if isinstance(pl_module, Draws) else None
        self.known = (
            list(pl_module.history),
            pl_module.best.compute() if pl_module.history else None,
        )

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.validations += batch_idx == 0
        if self.validations == 2:
            raise StoppedBySignal("SIGTERM")


def stopped(*callbacks: Any, kind: type[Module] = Module) -> tuple[Any, Watch]:
    torch.manual_seed(0)
    module, watch, data = kind(), Watch(), DataLoader(torch.randn(16, 4), batch_size=4)
    trainer = quiet_trainer(max_epochs=2, callbacks=[*callbacks, watch])
    with pytest.raises(StoppedBySignal):
        trainer.fit(module, data, data)
    return module, watch


@pytest.mark.parametrize(
    "make", [lambda: EMAWeightAveraging(decay=0.5), Swaps], ids=["Lightning's", "a user's"]
)
def test_weights_are_put_back(make):
    module, watch = stopped(make())
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, watch.weights[name], rtol=0, atol=0)


def test_values_of_whole_validations_are_not_touched():
    early = EarlyStopping("val/best", patience=5, mode="max")
    module, watch = stopped(early)
    assert (module.history, module.best.compute()) == watch.known
    assert module.history == [4]
    assert early.wait_count == 0


def test_what_the_part_of_a_validation_has_changed_is_undone():
    module, watch = stopped(kind=Draws)
    assert module.state() == watch.state
    assert module.batches == 4


def test_a_hook_that_fails_is_named(caplog):
    stopped(Fails())
    assert (
        "Fails.on_validation_end failed when the run was stopped within a validation (KeyError: "
        "'lost')" in caplog.text
    )
