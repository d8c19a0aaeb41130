"""A regressor, and what users change of it: schedules, logging, hooks, manual optimization."""

import copy
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.optim import lr_scheduler
from torchmetrics import MeanMetric


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
        config = {
            "scheduler": schedule,
            "monitor": "train/loss",
            "interval": "epoch",
            "frequency": 2,
            "strict": True,
        }
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
        return [optimizer], [
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)
        ]


class Sequential(Regressor):
    """Warm-up per epoch, then cosine."""

    def configure_optimizers(self):
        optimizer = self.sgd()
        warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=1)
        cosine = lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=max(1, self.trainer.max_epochs - 1)
        )
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
    """Updates only every second batch, within automatic optimization: the recipe of Lightning's
    page.
    """

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


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


class LogsMetric(Regressor):
    """A metric object that is logged in steps."""

    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        self.mean.update(batch[0])
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


class ReadsOnRank0(LogsMetric):
    """Hooks at the end of an epoch print, on one rank, what all have logged."""

    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            assert {"train/loss", "mean"} <= self.trainer.callback_metrics.keys()

    def on_validation_epoch_end(self):
        if self.trainer.is_global_zero:
            assert "val/loss" in self.trainer.callback_metrics


class FlushesMetric(LogsMetric):
    """The metric takes a last value at the end of the epoch."""

    def on_train_epoch_end(self):
        self.mean.update(100.0, weight=4 / self.trainer.world_size)


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
        self.log(
            "smallest", x.min(), reduce_fx=torch.min, on_step=False, on_epoch=True, sync_dist=True
        )
        self.log(
            "count", float(len(x)), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True
        )
        self.log("mine", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("mine_local", loss)
        return {"loss": loss, "extra": x.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("extra_mean", outputs["extra"].mean(), sync_dist=True)


class LogsDoubles(Regressor):
    """Values in float64, of steps, epochs and the validation before, one of them logged in an
    epoch's first step.
    """

    def on_train_epoch_start(self):
        self.log("start", torch.tensor(self.current_epoch + 1.0, dtype=torch.float64) / 3)

    def training_step(self, batch, batch_idx):
        value = batch[0].double().mean() / 3
        self.log("double", value, on_step=True, on_epoch=True, sync_dist=True)
        self.log(
            "doubles",
            batch[0].double().sum() / 3,
            on_step=False,
            on_epoch=True,
            reduce_fx="sum",
            sync_dist=True,
        )
        if batch_idx == 0:
            self.log("first", value, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        validated = self.trainer.callback_metrics.get(
            "val/double", torch.tensor(0.1, dtype=torch.float64)
        )
        self.log("validated", validated + 1 / 3)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val/double", batch[0].double().mean() / 3, sync_dist=True)


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
    """The same for training: a list of the epoch so far, which is no state of a checkpoint unless
    it is saved.
    """

    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        losses = [
            loss.to(self.device) for loss in self.losses
        ]  # those of a checkpoint are on the CPU
        self.log("epoch_mean", torch.stack(losses).mean(), sync_dist=True)
        self.losses.clear()

    def on_save_checkpoint(self, checkpoint):
        checkpoint["losses"] = list(self.losses)

    def on_load_checkpoint(self, checkpoint):
        self.losses = checkpoint["losses"]


class TwoLoaders(Regressor):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        self.log("val/loss", F.mse_loss(self(x), y), sync_dist=True)
        self.log(
            f"own/{dataloader_idx}", F.l1_loss(self(x), y), add_dataloader_idx=False, sync_dist=True
        )


class InitializedInSetup(Regressor):
    """Weights are filled in setup(stage)."""

    def setup(self, stage):
        if stage == "fit":
            for name, param in self.net.named_parameters():
                values = torch.sin(torch.arange(float(param.numel())) + len(name)).reshape(
                    param.shape
                )
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
            mix = torch.rand((), device=x.device) * 0.2
            order = torch.randperm(len(x), device=x.device)
            noise = torch.tensor(
                np.random.normal(scale=0.01, size=x.shape), dtype=x.dtype, device=x.device
            )
            batch = (
                F.dropout((1 - mix) * x + mix * x[order] + noise, 0.1),
                (1 - mix) * y + mix * y[order],
            )
        return super().shared_step(batch, stage)


class TeacherCopy(Regressor):
    """A deep copy as teacher, made in on_fit_start and moved in on_before_zero_grad."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def on_before_zero_grad(self, optimizer):
        with torch.no_grad():
            for student, teacher in zip(
                self.net.parameters(), self.teacher.parameters(), strict=True
            ):
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
        return [optimizer], [
            lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5)
        ]


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


# ---------------------------------------------------------------- parameters in ways that sharding
# must bear
class L1(Regressor):
    """A penalty over all parameters in the loss."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + 1e-3 * sum(p.abs().sum() for p in self.parameters())


class ScalarParameter(Regressor):
    """A temperature, as CLIP has it: a parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.net(x) * self.logit_scale.exp()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 1)

    def encode(self, x):
        return torch.tanh(self.inner(x))

    def decode(self, z):
        return self.outer(z)


class OtherMethods(Regressor):
    """Methods of a submodule other than forward."""

    def __init__(self):
        super().__init__()
        self.net = Encoder()

    def forward(self, x):
        return self.net.decode(self.net.encode(x))


class WeightOutside(Regressor):
    """A weight that is used outside of its module's forward."""

    def forward(self, x):
        return self.net(x) + F.linear(x, self.net[0].weight).mean(1, keepdim=True)


class Unused(Regressor):
    """A layer without a part in the loss."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(8, 3)


class SometimesUsed(Regressor):
    """A branch that only some batches take."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x) + (self.branch(x) if batch_idx % 2 else 0)
        return F.mse_loss(out, y)


class Lists(Regressor):
    """ParameterList, ParameterDict, a parameter of one row, a buffer of booleans."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(2)])
        self.table = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(1, 8))})
        self.register_buffer("keep", torch.arange(8) != 3)

    def forward(self, x):
        for scale in self.scales:
            x = x * scale
        return self.net((x + self.table["bias"]) * self.keep)


class ClampsWeights(Regressor):
    """Weights are changed after each step, and the bias is reset at the start of each epoch."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-0.3, 0.3)

    def on_train_epoch_start(self):
        nn.init.zeros_(self.net[2].bias)


class NoisyGradients(Regressor):
    """Gradients are changed in on_after_backward, and looked at for NaN."""

    def on_after_backward(self):
        for p in self.parameters():
            if p.grad is not None:
                assert torch.isfinite(p.grad).all()
                p.grad.mul_(0.5)


class MultiHead(Regressor):
    """torch's attention, which reads the weights of its own submodule."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        h = x.view(len(x), 2, 4)
        h, _ = self.attention(h, h, h)
        return self.net(x + h.flatten(1))


# ---------------------------------------------------------------- the Trainer, asked for this and
# that
class Annealing(Regressor):
    """Weights of the loss by global_step, current_epoch and the Trainer's counts of batches."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        done = self.global_step / self.trainer.estimated_stepping_batches
        within = batch_idx / self.trainer.num_training_batches
        return loss * (1 + done + within + 0.1 * self.current_epoch)

    def on_train_epoch_end(self):
        self.log("val_of_epoch", self.trainer.callback_metrics["val/loss"])


class SkipsTheRest(Regressor):
    """on_train_batch_start returns -1: the rest of the epoch is left out."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 4 else None


class SkipsWithinAStep(Regressor):
    """The same from the middle of an accumulated step on."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 9 else None


class OwnCallbacks(Regressor):
    """configure_callbacks."""

    def configure_callbacks(self):
        return [L.pytorch.callbacks.EarlyStopping("val/loss", mode="max", patience=1)]


class OwnLoaders(Regressor):
    """Loaders in the module itself."""

    def train_dataloader(self):
        samples = [(torch.full((8,), float(i)), torch.ones(1)) for i in range(16)]
        return torch.utils.data.DataLoader(samples, batch_size=8)


class Collisions(Regressor):
    """Names that metrics.csv has too."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train/loss", loss * 2, on_step=True, on_epoch=False, sync_dist=True)
        self.log("lr", 7.0)
        self.log("epoch", float(self.current_epoch))
        self.log("samples", float(len(x)))
        return loss


class SometimesLogs(Regressor):
    """A mean over the epoch of values that only some batches have."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 3 == 1:
            self.log("rare", loss, on_step=False, on_epoch=True, sync_dist=True)
        if batch_idx == 4:
            self.log("rare_step", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


class GathersInValidation(Regressor):
    """all_gather of a dict at the end of the validation; the strategy's broadcast and barrier."""

    def on_validation_epoch_start(self):
        self.seen = []

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.seen.append((self(x) - y)[:, 0])

    def on_validation_epoch_end(self):
        gathered = self.all_gather({"error": torch.cat(self.seen)})["error"].flatten()
        self.trainer.strategy.barrier()
        worst = self.trainer.strategy.broadcast(float(gathered.abs().max()))
        self.log("val/worst", worst)
        self.log("val/loss", gathered.square().mean())
        if self.trainer.is_global_zero:
            self.log("val/count", float(len(gathered)), rank_zero_only=True)


class Seeds(Regressor):
    """seed_everything in the constructor, and random initial weights by hand."""

    def __init__(self, seed: int = 42):
        L.seed_everything(seed, workers=True)
        super().__init__()
        for p in self.parameters():
            nn.init.normal_(p, std=0.3)


class Zoo(Regressor):
    """Any optimizer and schedule of torch by its name."""

    def __init__(
        self, kind: str, lr: float = 0.01, schedule: str | None = None, options: dict | None = None
    ):
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self):
        optimizer = getattr(torch.optim, self.hparams.kind)(self.parameters(), lr=self.hparams.lr)
        if self.hparams.schedule is None:
            return optimizer
        schedule = getattr(lr_scheduler, self.hparams.schedule)(optimizer, **self.hparams.options)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Doubling:
    """A callable object as factor of LambdaLR, whose attributes the schedule's state holds."""

    def __init__(self):
        self.calls = 0

    def __call__(self, step):
        self.calls += 1
        return 0.9**step


class Cyclic(Regressor):
    """Schedules whose state is more than numbers.

    CyclicLR with a function, then a LambdaLR with an object.
    """

    def configure_optimizers(self):
        optimizer = self.sgd()
        cyclic = lr_scheduler.CyclicLR(
            optimizer, 0.01, 0.1, step_size_up=3, scale_fn=lambda x: 0.9**x
        )
        return [optimizer], [{"scheduler": cyclic, "interval": "step"}]


class ObjectLambda(Regressor):
    def configure_optimizers(self):
        optimizer = self.sgd()
        return [optimizer], [
            {"scheduler": lr_scheduler.LambdaLR(optimizer, Doubling()), "interval": "step"}
        ]


class OwnOptimizer(torch.optim.Optimizer):
    """Lookahead: slow weights per parameter in the state, a counter of its own in the groups."""

    def __init__(self, params, lr: float = 0.05, every: int = 4):
        super().__init__(params, {"lr": lr, "count": 0})
        self.every = every

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["slow"] = p.detach().clone()
                p.add_(p.grad, alpha=-group["lr"])
                if group["count"] % self.every == 0:
                    state["slow"].lerp_(p, 0.5)
                    p.copy_(state["slow"])
        return loss


class Lookahead(Regressor):
    def configure_optimizers(self):
        return OwnOptimizer(self.parameters())


class Named(Regressor):
    """named_parameters, an optimizer with amsgrad, and two groups by hand with rates of their
    own.
    """

    def configure_optimizers(self):
        biases = [p for n, p in self.named_parameters() if n.endswith("bias")]
        rest = [p for n, p in self.named_parameters() if not n.endswith("bias")]
        groups = [
            {"params": rest, "lr": 1e-2, "name": "weights"},
            {"params": biases, "lr": 3e-2, "name": "biases"},
        ]
        return torch.optim.AdamW(groups, amsgrad=True, weight_decay=0.01)


class SAM(Manual):
    """Sharpness-aware minimization: two backward passes per step, weights moved and restored in
    between.
    """

    def training_step(self, batch, batch_idx):
        opt, old = self.optimizers(), []
        opt.zero_grad()
        self.manual_backward(self.shared_step(batch, "train"))
        with torch.no_grad():
            for p in self.net.parameters():
                old.append(p.detach().clone())
                p.add_(p.grad, alpha=0.05)
        opt.zero_grad()
        x, y = batch
        self.manual_backward(F.mse_loss(self(x), y))
        with torch.no_grad():
            for p, value in zip(self.net.parameters(), old, strict=True):
                p.copy_(value)
        opt.step()


class SemiSupervised(Regressor):
    """A batch that is a dict of two batches."""

    def training_step(self, batch, batch_idx):
        loss = self.shared_step(batch["labeled"], "train")
        x, _ = batch["unlabeled"]
        return loss + 0.1 * (self(x) - self(x + 0.01)).square().mean()


class Objects(Regressor):
    """Batches that are dataclasses, moved by hand."""

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        batch.x, batch.y = batch.x.to(device), batch.y.to(device)
        return batch

    def shared_step(self, batch, stage):
        loss = F.mse_loss(self(batch.x), batch.y)
        self.log(
            f"{stage}/loss",
            loss,
            on_step=False,
            on_epoch=True,
            batch_size=len(batch.names),
            sync_dist=True,
        )
        return loss
