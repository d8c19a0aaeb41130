"""What modules ask of their Trainer, loggers, summaries and hyperparameters, and averages by
packages.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from functools import wraps

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torchmetrics import Metric, MetricCollection

from tests.lightning_habits import plain
from tests.lightning_habits.regression import Regressor


class StepsInSetup(Regressor):
    """The length of the schedule is asked for in setup."""

    def setup(self, stage):
        self.steps = self.trainer.estimated_stepping_batches if stage == "fit" else 1

    def configure_optimizers(self):
        optimizer = self.sgd()
        schedule = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=int(self.steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SetsUpData(Regressor):
    """The Trainer's loader before it is there: fit_loop.setup_data()."""

    def configure_optimizers(self):
        optimizer = self.sgd()
        self.trainer.fit_loop.setup_data()
        steps = len(self.trainer.train_dataloader)
        schedule = lr_scheduler.OneCycleLR(
            optimizer, 0.1, steps_per_epoch=steps, epochs=self.trainer.max_epochs
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Summarized(Regressor):
    """An example for summaries and graphs; a scripted layer."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16),
            nn.BatchNorm1d(16),
            nn.Dropout(0.0),
            torch.jit.script(nn.Tanh()),
            nn.Linear(16, 1),
        )
        self.example_input_array = torch.ones(4, 8)


class ScriptedWeights(Regressor):
    """A scripted layer with weights."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), torch.jit.script(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 1)
        )


class ExampleOfDict(Regressor):
    """forward takes keywords, and its example is a dict."""

    example_input_array = property(lambda self: {"x": torch.zeros(2, 8), "scale": torch.ones(1)})

    def forward(self, x, scale=1.0):
        return self.net(x) * scale


class LogsHparams(Regressor):
    """TensorBoard's idiom: hyperparameters with metrics that they are compared by."""

    def on_train_start(self):
        self.logger.log_hyperparams(self.hparams, {"hp/loss": 0.0, "hp/rate": 0.0})

    def validation_step(self, batch, batch_idx):
        loss = super().validation_step(batch, batch_idx)
        self.log("hp/loss", loss, sync_dist=True)
        self.logger.log_metrics({"by_hand": float(self.current_epoch)}, step=self.global_step)

    def on_train_epoch_end(self):
        experiment = self.logger.experiment
        for name, p in self.named_parameters():
            value = p.full_tensor() if hasattr(p, "full_tensor") else p
            experiment.add_histogram(name, value, self.current_epoch)
        experiment.add_scalars("several", {"a": 1.0, "b": 2.0}, self.global_step)


class ReadsRates(Regressor):
    """Rates of the optimizer and of the schedule, read in the step."""

    def training_step(self, batch, batch_idx):
        self.log("rate", self.optimizers().param_groups[0]["lr"], prog_bar=True)
        self.log("last", self.lr_schedulers().get_last_lr()[0])
        self.log("of_trainer", self.trainer.optimizers[0].param_groups[0]["lr"])
        config = self.trainer.lr_scheduler_configs[0]
        self.log("of_config", config.scheduler.get_last_lr()[0])
        assert config.interval == "step"
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = self.sgd()
        schedule = lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 2},
        }


class Sum(Metric):
    def __init__(self):
        super().__init__()
        self.add_state("x", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, x):
        self.x += x

    def compute(self):
        return self.x


class Whole(Metric):
    """A mean of whole numbers, reduced by a function."""

    def __init__(self):
        super().__init__()
        self.add_state("sum", torch.tensor(0), dist_reduce_fx=torch.sum)
        self.add_state("count", torch.tensor(0), dist_reduce_fx=torch.sum)

    def update(self, x):
        self.sum += x
        self.count += 1

    def compute(self):
        return self.sum // self.count


class NestedMetrics(Regressor):
    """Metrics in lists in dicts, logged from several hooks, under several names."""

    def __init__(self):
        super().__init__()
        self.several = nn.ModuleList([Sum(), Whole()])
        self.collection = MetricCollection({"a": Sum(), "b": Whole()})
        self.nested = nn.ModuleDict({"a": nn.ModuleList([nn.ModuleDict({"b": Sum()}), Sum()])})
        self.at_end = Sum()

    def training_step(self, batch, batch_idx):
        for metric in self.several:
            metric(batch_idx)
        self.collection["a"](batch_idx)
        self.collection["b"](batch_idx + 1)
        self.nested["a"][0]["b"](batch_idx)
        self.nested["a"][1](2 * batch_idx)
        self.at_end.update(batch_idx)
        self.log("list_0", self.several[0], on_step=False, on_epoch=True)
        self.log("list_1", self.several[1], on_step=True, on_epoch=True)
        self.log("dict_a", self.collection["a"], on_step=True, on_epoch=False)
        self.log("dict_b", self.collection["b"], on_epoch=True)
        self.log("nested", self.nested["a"][0]["b"], on_step=False, on_epoch=True)
        self.log(
            "nested_1",
            self.nested["a"][1],
            on_step=False,
            on_epoch=True,
            metric_attribute="nested.a.1",
        )
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("at_end", self.at_end)


def logged(function):
    @wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Container(Regressor):
    """One argument holds all hyperparameters; the constructor is decorated."""

    @logged
    def __init__(self, hparams, *more, **others):
        super().__init__()
        self.save_hyperparameters(hparams)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class OfNamespace(Regressor):
    """hparams as a Namespace, changed while training."""

    def __init__(self, **config):
        super().__init__()
        self.save_hyperparameters(Namespace(**config))

    def on_train_epoch_start(self):
        self.hparams.lr = 0.05 / (1 + self.current_epoch)
        for group in self.optimizers().param_groups:
            group["lr"] = self.hparams.lr


class WithFunction(Regressor):
    """A function is among the saved hyperparameters."""

    def __init__(self, activation=lambda x: x.tanh(), lr: float = 0.05):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))

    def forward(self, x):
        return self.net[1](self.hparams.get("activation", torch.tanh)(self.net[0](x)))


@dataclass(eq=False)
class DataClass(Regressor):
    """A module that is a dataclass."""

    wide: int = 16
    lr: float = 0.05

    def __post_init__(self):
        super().__init__(lr=self.lr, width=self.wide)


class OtherBatchSize(Regressor):
    """The data module has a hyperparameter of the same name with another value."""

    def __init__(self, batch_size: int = 1, lr: float = 0.05):
        super().__init__(lr=lr)
        self.save_hyperparameters()


class SameNames(plain.Vectors):
    pass


class TorchEMA:
    """torch_ema's form: a list of shadows, which are swapped in and back."""

    def __init__(self, parameters, decay):
        self.decay, self.updates = decay, 0
        self.parameters = [p for p in parameters if p.requires_grad]
        self.shadows = [p.clone().detach() for p in self.parameters]
        self.stored = []

    @torch.no_grad()
    def update(self):
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for shadow, p in zip(self.shadows, self.parameters, strict=True):
            shadow.sub_((1 - decay) * (shadow - p))

    def store(self):
        self.stored = [p.clone() for p in self.parameters]

    def copy_to(self, values):
        for value, p in zip(values, self.parameters, strict=True):
            p.data.copy_(value.data)

    def state_dict(self):
        return {"decay": self.decay, "updates": self.updates, "shadows": self.shadows}

    def load_state_dict(self, state):
        self.decay, self.updates = state["decay"], state["updates"]
        self.shadows = [
            x.to(p.device, copy=True)
            for x, p in zip(state["shadows"], self.parameters, strict=True)
        ]

    def to(self, device):
        self.shadows = [shadow.to(device) for shadow in self.shadows]


class AveragedByPackage(Regressor):
    """Averages are made in __init__, kept by the checkpoint's hooks, and validated."""

    def __init__(self):
        super().__init__()
        self.ema = TorchEMA(self.parameters(), 0.9)

    def on_fit_start(self):
        self.ema.to(self.device)

    def on_before_zero_grad(self, *args):
        self.ema.update()

    def on_validation_epoch_start(self):
        self.ema.store()
        self.ema.copy_to(self.ema.shadows)

    def on_validation_epoch_end(self):
        self.ema.copy_to(self.ema.stored)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["ema"] = self.ema.state_dict()

    def on_load_checkpoint(self, checkpoint):
        self.ema.load_state_dict(checkpoint["ema"])


class AveragedLate(AveragedByPackage):
    """The same, made when the training starts."""

    def __init__(self):
        Regressor.__init__(self)
        self.ema, self.loaded = None, None

    def on_fit_start(self):
        self.ema = TorchEMA(self.parameters(), 0.9)
        if self.loaded is not None:
            self.ema.load_state_dict(self.loaded)

    def on_load_checkpoint(self, checkpoint):
        self.loaded = checkpoint["ema"]


class AddsLoader(Regressor):
    """Validation on a loader of one's own, at the end of an epoch."""

    def on_train_epoch_end(self):
        loader = torch.utils.data.DataLoader(
            self.trainer.datamodule.val, batch_size=4, shuffle=True
        )
        self.eval()
        with torch.no_grad():
            losses = [F.mse_loss(self(x.to(self.device)), y.to(self.device)) for x, y in loader]
        self.train()
        self.log("own", torch.stack(losses).mean())


class HasOurNames(Regressor):
    """Names that mean something in our own modules: here a name of an architecture and a plot of
    samples.
    """

    model = "mlp"

    def preview(self, x, title):
        return f"{title}: {self(x)}"


class HasOurNamesToo(plain.Vectors):
    """The same of a data module."""

    def __init__(self, batch_size: int = 8):
        super().__init__(batch_size)
        self.baselines = {"mean": 0.5}
