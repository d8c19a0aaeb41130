"""The Trainer's settings, and stops at chosen steps."""

from torch.optim import lr_scheduler

from tests.lightning_habits.habit import INSIDE, ddp, fsdp
from tests.lightning_habits.regression import Regressor, TrainOnly


class OneCycle(Regressor):
    def configure_optimizers(self):
        optimizer = self.sgd()
        total = self.trainer.estimated_stepping_batches
        schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=int(total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


HABITS = [
    ddp(Regressor, sample=True),
    fsdp(Regressor, "trainer.test_at_end=true", name="TestAtEnd"),
    # fsdp does not take it
    ddp(Regressor, "trainer.precision=64-true", name="Float64"),
    fsdp(
        Regressor,
        "trainer.gradient_clip_algorithm=value",
        "trainer.gradient_clip_val=0.05",
        name="ClipsByValue",
    ),
    ddp(Regressor, "trainer.limit_train_batches=5", name="LimitedTrain"),
    ddp(TrainOnly),
    fsdp(OneCycle, "trainer.max_epochs=null", "trainer.max_steps=15", name="EndsInsideAnEpoch"),
    ddp(OneCycle, name="StopAtTheLastStep", resume=INSIDE, stop=18),
]
