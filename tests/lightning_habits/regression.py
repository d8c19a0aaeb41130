"""A regressor, and what users change of it: schedules, logging, hooks, manual optimization."""

import copy
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.optim import lr_scheduler


class Regressor(L.LightningModule):
    """The module of most of these: a shared step, logged losses."""

    def __init__(self, lr: float = 0.05, width: int = 16):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x):
        return self.net(x)

    def shared_step(self, batch, stage):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log(f"{stage}/loss", loss, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.shared_step(batch, "train")

    def validation_step(self, batch, batch_idx):
        return self.shared_step(batch, "val")

    def test_step(self, batch, batch_idx):
        return self.shared_step(batch, "test")

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)

    def sgd(self):
        return Regressor.configure_optimizers(self)


# ---------------------------------------------------------------- schedules
class Plateau(Regressor):
    """On a metric of validation, at the end of each epoch."""

    def configure_optimizers(self):
        optimizer = self.sgd()
        schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, mode="max")
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val/loss"}


class FrequentPlateau(Regressor):
    """Every two epochs, on a training metric of the epoch."""

    def configure_optimizers(self):
        optimizer = self.sgd()
        schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, mode="max")
        config = {"scheduler": schedule, "monitor": "train/loss", "interval": "epoch", "frequency": 2, "strict": True}
        return {"optimizer": optimizer, "lr_scheduler": config}


class StepPlateau(Regressor):
    """On a value of the step, every four steps."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("step_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = self.sgd()
        schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.7)
        config = {"scheduler": schedule, "monitor": "step_loss", "interval": "step", "frequency": 4}
        return [optimizer], [config]


class OneCycle(Regressor):
    def configure_optimizers(self):
        optimizer = self.sgd()
        total = self.trainer.estimated_stepping_batches
        schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=int(total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class CosineEpochs(Regressor):
    """The length of the schedule is the Trainer's max_epochs."""

    def configure_optimizers(self):
        optimizer = self.sgd()
        return [optimizer], [lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)]


class Sequential(Regressor):
    """Warm-up per epoch, then cosine."""

    def configure_optimizers(self):
        optimizer = self.sgd()
        warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=1)
        cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, self.trainer.max_epochs - 1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedule = lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[1])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule}}


class Lambda(Regressor):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "name": "my_lr"}]


class OwnWarmup(Regressor):
    """Lightning's recipe: the rate is set in optimizer_step."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 6:
            scale = min(1.0, float(self.trainer.global_step + 1) / 6)
            for group in optimizer.param_groups:
                group["lr"] = scale * self.hparams.lr


class SkippedUpdates(Regressor):
    """Updates only every second batch, within automatic optimization: the recipe of Lightning's page."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class TwoSchedules(Regressor):
    """Two schedules of one optimizer: one per step, one per epoch."""

    def configure_optimizers(self):
        optimizer = self.sgd()
        return [optimizer], [
            {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.98), "interval": "step"},
            {"scheduler": lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "epoch"},
        ]


class LBFGS(Regressor):
    """A closure that is called several times per step."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, history_size=4)


# ---------------------------------------------------------------- steps and hooks
class GradNorms(Regressor):
    """Lightning's utility, per parameter, before each step."""

    def on_before_optimizer_step(self, optimizer):
        norms = grad_norm(self.net, norm_type=2)
        self.log_dict(norms)


class TotalNorm(Regressor):
    """The total gradient norm by hand, logged."""

    def on_before_optimizer_step(self, optimizer):
        total = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        if hasattr(total, "full_tensor"):
            total = total.full_tensor()
        self.log("total_norm", total)


class SkipsSteps(Regressor):
    """None from training_step now and then."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 4 == 1 else loss


class Reductions(Regressor):
    """reduce_fx, on_step and on_epoch, log_dict, several names."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        x, _ = batch
        self.log("largest", x.max(), reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)
        self.log("smallest", x.min(), reduce_fx=torch.min, on_step=False, on_epoch=True, sync_dist=True)
        self.log("count", float(len(x)), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        self.log("mine", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("mine_local", loss)
        return {"loss": loss, "extra": x.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("extra_mean", outputs["extra"].mean(), sync_dist=True)


class CollectsOutputs(Regressor):
    """Lightning 2's form of *_epoch_end: outputs are kept in a list."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.outputs.append((self(x) - y).square())

    def on_validation_epoch_end(self):
        self.log("val/loss", torch.cat(self.outputs).mean(), sync_dist=True)
        self.outputs.clear()


class CollectsTrainOutputs(Regressor):
    """The same for training: a list of the epoch so far, which is no state of a checkpoint unless it is saved."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("epoch_mean", torch.stack(self.losses).mean(), sync_dist=True)
        self.losses.clear()

    def on_save_checkpoint(self, checkpoint):
        checkpoint["losses"] = list(self.losses)

    def on_load_checkpoint(self, checkpoint):
        self.losses = checkpoint["losses"]


class TwoLoaders(Regressor):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        self.log("val/loss", F.mse_loss(self(x), y), sync_dist=True)
        self.log(f"own/{dataloader_idx}", F.l1_loss(self(x), y), add_dataloader_idx=False, sync_dist=True)


class InitializedInSetup(Regressor):
    """Weights are filled in setup(stage)."""

    def setup(self, stage):
        if stage == "fit":
            for name, param in self.net.named_parameters():
                values = torch.sin(torch.arange(float(param.numel())) + len(name)).reshape(param.shape)
                with torch.no_grad():
                    param.copy_(0.3 * values)


class BuiltInSetup(Regressor):
    """Layers are made in setup(stage), from the data module, as Lightning's page on data has it."""

    def __init__(self):
        super().__init__()
        del self.net

    def setup(self, stage):
        if not hasattr(self, "net"):
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


class TrainOnly(L.LightningModule):
    """No validation, no test, nothing logged."""

    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(8, 1)

    def forward(self, x):
        return self.l1(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


class FrozenBackbone(Regressor):
    """A frozen backbone in eval mode, in no_grad; the optimizer has the head only."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.backbone.requires_grad_(False)
        self.backbone.eval()

    def forward(self, x):
        with torch.no_grad():
            x = self.backbone(x)
        return self.net(x)

    def on_train_epoch_start(self):
        self.backbone.eval()

    def configure_optimizers(self):
        return torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=1e-2)


class Tied(Regressor):
    """Encoder and decoder share one weight; loss by reconstruction."""

    def __init__(self):
        super().__init__()
        self.net = None
        self.inner = nn.Linear(8, 8, bias=False)
        self.outer = nn.Linear(8, 8)
        self.outer.weight = self.inner.weight

    def shared_step(self, batch, stage):
        x, _ = batch
        loss = F.mse_loss(self.outer(torch.tanh(self.inner(x))), x)
        self.log(f"{stage}/rec", loss, sync_dist=True)
        return loss


class Draws(Regressor):
    """Dropout, mixup from torch's generator, and noise from numpy's."""

    def shared_step(self, batch, stage):
        if stage == "train":
            import numpy as np

            x, y = batch
            mix = torch.rand(()) * 0.2
            order = torch.randperm(len(x))
            noise = torch.tensor(np.random.normal(scale=0.01, size=x.shape), dtype=x.dtype)
            batch = (F.dropout((1 - mix) * x + mix * x[order] + noise, 0.1), (1 - mix) * y + mix * y[order])
        return super().shared_step(batch, stage)


class TeacherCopy(Regressor):
    """A deep copy as teacher, made in on_fit_start and moved in on_before_zero_grad."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def on_before_zero_grad(self, optimizer):
        with torch.no_grad():
            for student, teacher in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
                teacher.mul_(0.9).add_(student, alpha=0.1)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        return super().training_step(batch, batch_idx) + 0.1 * F.mse_loss(self(x), self.teacher(x))


class Penalty(Regressor):
    """A second derivative: the gradient penalty of the inputs."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = x.clone().requires_grad_()
        out = self(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + 0.1 * grad.square().sum(1).mean()


# ---------------------------------------------------------------- manual optimization
class Manual(Regressor):
    """One optimizer, one step per batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        opt.zero_grad()
        loss = self.shared_step(batch, "train")
        self.manual_backward(loss)
        opt.step()


class ManualAccumulation(Manual):
    """Lightning's recipe: a step every two batches, and a schedule per epoch."""

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        loss = self.shared_step(batch, "train") / 2
        self.manual_backward(loss)
        if (batch_idx + 1) % 2 == 0:
            opt.step()
            opt.zero_grad()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()
        return loss

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
            self.clip_gradients(opt, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            return loss

        opt.step(closure=closure)

    def on_train_epoch_end(self):
        schedule = self.lr_schedulers()
        if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
            schedule.step(self.trainer.callback_metrics["train/loss"])

    def configure_optimizers(self):
        optimizer = self.sgd()
        return [optimizer], [lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5)]


class SometimesSteps(Manual):
    """Most batches take no step, some take two."""

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        for _ in range((0, 2, 0, 1)[batch_idx % 4]):
            opt.zero_grad()
            self.manual_backward(self.shared_step(batch, "train"))
            opt.step()


class TwoOptimizers(Manual):
    """Body and head have optimizers of their own, stepped by turns."""

    def training_step(self, batch, batch_idx):
        opts = self.optimizers()
        opt = opts[batch_idx % 2]
        loss = self.shared_step(batch, "train")
        self.toggle_optimizer(opt)
        opt.zero_grad()
        self.manual_backward(loss)
        opt.step()
        self.untoggle_optimizer(opt)
        return {"loss": loss}

    def configure_optimizers(self):
        return (
            torch.optim.SGD(self.net[0].parameters(), lr=0.05, momentum=0.9),
            torch.optim.Adam(self.net[2].parameters(), lr=0.01),
        )
