"""What ranks do apart from one another: values by their own data, work of rank 0 alone."""

import copy
import random

import torch
from torch.optim import lr_scheduler
from torchmetrics import MeanMetric

from tests.lightning_habits.generative import GAN
from tests.lightning_habits.regression import Manual, Regressor


class LogsByData(Regressor):
    """A loss of some samples is logged if the batch has such samples, which is so on some ranks
    only.
    """

    def training_step(self, batch, batch_idx):
        x, y = batch
        chosen = x[:, 0] > 0.8
        if chosen.any():
            far, count = (self(x[chosen]) - y[chosen]).abs().mean(), int(chosen.sum())
            options = {"on_step": False, "on_epoch": True, "sync_dist": True}
            self.log("chosen", far, batch_size=count, **options)
        return super().training_step(batch, batch_idx)


class LogsNamesByData(Regressor):
    """A value per class that occurs in the batch: names and their order differ between ranks."""

    def training_step(self, batch, batch_idx):
        x, _ = batch
        kinds = x[:, :3].argmax(1)
        for kind in dict.fromkeys(kinds.tolist()):
            own = x[kinds == kind]
            self.log(
                f"kind/{kind}",
                own.mean(),
                batch_size=len(own),
                on_step=False,
                on_epoch=True,
                sync_dist=True,
            )
        return super().training_step(batch, batch_idx)


class MetricByData(Regressor):
    """A metric object that some ranks update."""

    def __init__(self):
        super().__init__()
        self.metric = MeanMetric()

    def training_step(self, batch, batch_idx):
        x, _ = batch
        if (x[:, 0] > 1.0).any():
            self.metric(x[x[:, 0] > 1.0].mean())
            self.log("metric", self.metric, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


class MetricUpdatedByData(MetricByData):
    """A metric object that some ranks update, computed by hand at the end of the epoch."""

    def training_step(self, batch, batch_idx):
        x, _ = batch
        if (x[:, 0] > 1.0).any():
            self.metric.update(x[x[:, 0] > 1.0])
        return Regressor.training_step(self, batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("metric", self.metric.compute())
        self.metric.reset()


class SamplesOnRankZero(Regressor):
    """Images of the validation are made on rank 0 alone: its forward waits for nobody."""

    def on_validation_epoch_end(self):
        if self.trainer.is_global_zero:
            with torch.no_grad():
                self.sampled = self(torch.ones(2, 8, device=self.device)).sum()


class SkipsByData(Regressor):
    """The rest of the epoch is left out if a batch is too easy, which some ranks see."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 4 and float(batch[0].mean()) > 0 else None


class StopsByData(Regressor):
    """One rank decides to stop."""

    def training_step(self, batch, batch_idx):
        if self.current_epoch == 1 and self.global_rank == self.trainer.world_size - 1:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class StepsByData(Regressor):
    """The update is left out on ranks whose loss is too large."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        loss = optimizer_closure()
        if float(loss) < 0.5:
            optimizer.step()


class PlateauByHand(Manual):
    """A plateau of manual optimization follows each rank's own loss."""

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self(batch[0]), batch[1])
        opt = self.optimizers()
        opt.zero_grad()
        self.manual_backward(loss)
        opt.step()
        self.log("loss", loss)
        self.lr_schedulers().step(loss.detach())

    def configure_optimizers(self):
        optimizer = self.sgd()
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return [optimizer], [plateau]


class SchedulesByOwnValue(Regressor):
    """A schedule of another package, which reads what each rank has logged of its own."""

    class Follows(lr_scheduler.LRScheduler):
        seen = 1.0

        def get_lr(self):
            return [rate * min(1.0, self.seen) for rate in self.base_lrs]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("own", loss)
        return loss

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.seen = float(self.trainer.callback_metrics.get("own", 1.0))
        scheduler.step()

    def configure_optimizers(self):
        optimizer = self.sgd()
        return [optimizer], [{"scheduler": self.Follows(optimizer), "interval": "step"}]


class StepsByAccuracy(GAN):
    """The discriminator makes no step while it is too good, which each rank decides by its own
    samples.
    """

    def training_step(self, batch, batch_idx):
        imgs, _ = batch
        opt_g, opt_d = self.optimizers()
        fake = self(self.noise(imgs))
        opt_g.zero_grad()
        self.manual_backward(-self.discriminate(fake).mean())
        opt_g.step()
        opt_d.zero_grad()
        real = self.discriminate(imgs)
        self.manual_backward(self.discriminate(fake.detach()).mean() - real.mean())
        if (real > 0).float().mean() < 0.8:
            opt_d.step()


class LocalBuffer(Regressor):
    """A running mean of this rank's inputs, which no code reduces."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running", torch.zeros(8))

    def training_step(self, batch, batch_idx):
        self.running.lerp_(batch[0].mean(0), 0.2)
        return super().training_step((batch[0] - self.running, batch[1]), batch_idx)


class LocalBufferInside(Regressor):
    """The same inside of the network."""

    class Centered(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("running", torch.zeros(8))

        def forward(self, x):
            if self.training:
                self.running.lerp_(x.detach().mean(0), 0.2)
            return x - self.running

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(self.Centered(), *self.net)


class DrawsNet(Regressor):
    """Each rank draws one of two networks of the same shape for each batch (ensembles, co-teaching,
    supernets).
    """

    def __init__(self):
        super().__init__()
        self.other = copy.deepcopy(self.net)

    def forward(self, x):
        return self.net(x) if not self.training or random.random() < 0.5 else self.other(x)
