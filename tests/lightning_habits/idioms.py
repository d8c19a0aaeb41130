"""Further modules as users of Lightning write them."""

from torch import nn
from torch.optim import lr_scheduler

from tests.lightning_habits.regression import Regressor


class LoaderLength(Regressor):
    """The length of the schedule, from the length of the data module's loader."""

    def configure_optimizers(self):
        optimizer = self.sgd()
        steps = len(self.trainer.datamodule.train_dataloader())
        schedule = lr_scheduler.OneCycleLR(
            optimizer, 0.1, steps_per_epoch=steps, epochs=self.trainer.max_epochs
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ClipsItself(Regressor):
    """Clips by torch, and centers gradients, before the step."""

    def on_before_optimizer_step(self, optimizer):
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.2)
        self.log("norm", norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        for p in self.parameters():
            if p.grad is not None and p.ndim > 1:
                p.grad -= p.grad.mean(dim=1, keepdim=True)


class NotYet(Regressor):
    """Layers whose shape is that of the first batch, which nobody has passed through them."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(1))
