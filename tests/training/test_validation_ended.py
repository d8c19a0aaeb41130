"""What is called when a validation has ended sees the validation's values, and what its hooks have
left.
"""

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

from armature.training.run_hooks import RunHooks
from tests.trainers import Squares, quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*many workers.*")


class Module(Squares):
    """Logs one name in training and in validation, and replaces its weights while it validates."""

    def training_step(self, batch, batch_idx):
        self.log("loss", 1.0)
        return super().training_step(batch, batch_idx)

    def on_validation_start(self):
        self.kept = self.net.weight.detach().clone()
        self.net.weight.data.fill_(7.0)

    def validation_step(self, batch, batch_idx):
        self.log("loss", 100.0 + self.current_epoch)

    def on_validation_end(self):
        self.net.weight.data.copy_(self.kept)


def test_it_sees_the_values_of_the_validation_and_the_weights_of_training():
    seen = []

    class Ended(RunHooks, L.Callback):
        def validation_ended(self, trainer):
            weight = trainer.lightning_module.net.weight[0, 0].item()
            seen.append(
                (
                    float(trainer.callback_metrics["loss"]),
                    weight == 7.0,
                    trainer.lightning_module.training,
                )
            )

    data = DataLoader(torch.ones(4, 4), batch_size=2)  # pyright: ignore[reportArgumentType]
    trainer = quiet_trainer(max_epochs=2, callbacks=[Ended()], num_sanity_val_steps=1)
    trainer.fit(Module(), data, data)
    assert seen == [(100.0, False, True), (101.0, False, True)]
