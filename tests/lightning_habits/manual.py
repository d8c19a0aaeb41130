"""Manual optimization, and steps that several optimizers share."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from tests.lightning_habits.habit import INSIDE, NO_CLIP, ddp, fsdp
from tests.lightning_habits.regression import Manual, Regressor


class ManualAccumulation(Manual):
    """Lightning's recipe: a step every two batches, and a schedule per epoch."""

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        self.manual_backward(self.shared_step(batch, "train") / 2)
        if (batch_idx + 1) % 2 == 0:
            opt.step()
            opt.zero_grad()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = self.sgd()
        return [optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.5)]


class ManualClosure(Manual):
    """A step with a closure, clipping, and a plateau that is stepped at the end of the epoch."""

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()

        def closure():
            loss = self.shared_step(batch, "train")
            opt.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(opt, gradient_clip_val=0.5, gradient_clip_algorithm="value")
            return loss

        opt.step(closure=closure)

    def on_train_epoch_end(self):
        self.lr_schedulers().step(self.trainer.callback_metrics["train/loss"])

    def configure_optimizers(self):
        optimizer = self.sgd()
        schedule = lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5)
        return [optimizer], [schedule]


class Frequencies(Manual):
    """The head is stepped with every batch, the body with every third, each by its schedule."""

    def training_step(self, batch, batch_idx):
        body, head = self.optimizers()
        body_schedule, head_schedule = self.lr_schedulers()
        self.manual_backward(self.shared_step(batch, "train"))
        head.step()
        head.zero_grad()
        head_schedule.step()
        if (batch_idx + 1) % 3 == 0:
            body.step()
            body.zero_grad()
        if self.trainer.is_last_batch:
            body_schedule.step(self.trainer.callback_metrics.get("val/loss", torch.tensor(1.0)))

    def configure_optimizers(self):
        body = torch.optim.SGD(self.net[0].parameters(), lr=0.05, momentum=0.9)
        head = torch.optim.Adam(self.net[2].parameters(), lr=0.01)
        plateau = lr_scheduler.ReduceLROnPlateau(body, patience=0, mode="max")
        return (
            {"optimizer": body, "lr_scheduler": {"scheduler": plateau, "monitor": "val/loss"}},
            {"optimizer": head, "lr_scheduler": lr_scheduler.ExponentialLR(head, 0.97)},
        )


class SyncsLate(Manual):
    """Accumulates two batches, and reduces gradients with the second alone."""

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        steps = (batch_idx + 1) % 2 == 0
        with opt.toggle_model(sync_grad=steps):
            self.manual_backward(self.shared_step(batch, "train") / 2)
            if steps:
                opt.step()
                opt.zero_grad()


class PlainOptimizers(Manual):
    """`optimizers(use_pl_optimizer=False)`: steps that Lightning does not see."""

    def training_step(self, batch, batch_idx):
        opt = self.optimizers(use_pl_optimizer=False)
        opt.zero_grad(set_to_none=False)
        self.manual_backward(self.shared_step(batch, "train"))
        nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        opt.step()


class NoOptimizer(Manual):
    """configure_optimizers returns None: statistics are collected, nothing is trained."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def training_step(self, batch, batch_idx):
        self.mean.lerp_(self.all_gather(batch[0].mean(0)).reshape(-1, 8).mean(0), 0.1)

    def configure_optimizers(self):
        return None


class Multitask(Manual):
    """Gradients of two losses, combined by hand, as PCGrad does."""

    def training_step(self, batch, batch_idx):
        opt, (x, y) = self.optimizers(), batch
        out = self(x)
        opt.zero_grad()
        self.manual_backward(F.mse_loss(out, y), retain_graph=True)
        first = [p.grad.clone() for p in self.parameters()]
        opt.zero_grad()
        self.manual_backward(F.l1_loss(out, -y))
        for p, one in zip(self.parameters(), first, strict=True):
            p.grad.mul_(0.3).add_(one)
        opt.step()


class SAM(Manual):
    """Sharpness-aware minimization: two backward passes, weights moved and restored between."""

    def training_step(self, batch, batch_idx):
        opt, old = self.optimizers(), []
        opt.zero_grad()
        self.manual_backward(self.shared_step(batch, "train"))
        with torch.no_grad():
            for p in self.net.parameters():
                old.append(p.detach().clone())
                p.add_(p.grad, alpha=0.05)
        opt.zero_grad()
        self.manual_backward(F.mse_loss(self(batch[0]), batch[1]))
        with torch.no_grad():
            for p, value in zip(self.net.parameters(), old, strict=True):
                p.copy_(value)
        opt.step()


class AccumulatesByHooks(Regressor):
    """Gradients of four batches per step, within automatic optimization."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 4 == 0:
            optimizer.zero_grad()

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 4 == 3 or self.trainer.is_last_batch:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class OwnZeroGrad(Regressor):
    """optimizer_zero_grad and backward are replaced."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def backward(self, loss, *args, **kwargs):
        (0.5 * loss).backward(*args, **kwargs)


HABITS = [
    fsdp(ManualAccumulation, NO_CLIP, sample=True, resume=INSIDE),
    ddp(ManualClosure, NO_CLIP),
    ddp(SyncsLate, NO_CLIP),
    ddp(PlainOptimizers, NO_CLIP),
    fsdp(NoOptimizer, NO_CLIP),
    fsdp(Frequencies, NO_CLIP, twice=True),
    fsdp(SAM, NO_CLIP),
    fsdp(AccumulatesByHooks, resume=INSIDE, stop=8, sample=True),
    fsdp(Multitask, NO_CLIP),
    ddp(OwnZeroGrad),
]
