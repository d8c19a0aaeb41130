"""Callbacks of Lightning and of users."""

import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch import nn

from tests.lightning_habits.habit import callback, ddp, fsdp, stock
from tests.lightning_habits.regression import Regressor


class Finetuned(Regressor):
    """A backbone that a callback freezes, and a head."""

    def __init__(self, head=nn.Linear):
        super().__init__()
        self.backbone, self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), head(8, 1)

    def forward(self, x):
        return self.net(self.backbone(x))

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


class FinetunedBesideWhole(Finetuned):
    """fsdp leaves its head whole."""

    def __init__(self):
        super().__init__(nn.RNNCell)


class Unfreeze(BaseFinetuning):
    """Lightning's FeatureExtractorFreezeUnfreeze."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, train_bn=True)


class Probe(Callback):
    """Runs the module in eval mode within training, as callbacks that draw samples do."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx % 3 == 0:
            pl_module.eval()
            with torch.no_grad():
                value = pl_module(torch.ones(2, 8, device=pl_module.device)).mean()
            pl_module.train()
            pl_module.log("probe", value, sync_dist=True)


class OnlineEvaluator(Callback):
    """A probe with an optimizer of its own, as lightning-bolts' SSLOnlineEvaluator."""

    def on_fit_start(self, trainer, pl_module):
        self.probe = nn.Linear(8, 1).to(pl_module.device)
        nn.init.zeros_(self.probe.weight)
        nn.init.zeros_(self.probe.bias)
        self.optimizer = torch.optim.Adam(self.probe.parameters(), lr=1e-2)
        if getattr(self, "restored", None):
            self.probe.load_state_dict(self.restored["probe"])
            self.optimizer.load_state_dict(self.restored["optimizer"])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.probe(x), y)
        loss.backward()
        for p in self.probe.parameters():
            p.grad = trainer.strategy.reduce(p.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        pl_module.log("probe_loss", loss.detach(), sync_dist=True)

    def state_dict(self):
        return {"probe": self.probe.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict):
        self.restored = state_dict


class KeepsBest(Callback):
    """Keeps the best weights in memory and puts them back at the end, as Keras does."""

    def __init__(self):
        self.best, self.weights = float("inf"), None

    def on_validation_end(self, trainer, pl_module):
        score = float(trainer.callback_metrics["val/loss"])
        if score < self.best:
            self.best, weights = score, pl_module.state_dict()
            self.weights = {name: value.detach().clone() for name, value in weights.items()}

    def on_train_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.weights)

    def state_dict(self):
        return {"best": self.best, "weights": self.weights}

    def load_state_dict(self, state_dict):
        self.best, self.weights = state_dict["best"], state_dict["weights"]


# fsdp shards one layer of Regressor, and leaves one whole
BESIDE_WHOLE = {"also": ("strategy.min_num_params=100",), "random": True}
HABITS = [
    ddp(Regressor, callback(KeepsBest), name="KeepsBest"),
    ddp(
        Regressor,
        stock("EarlyStopping", monitor="val/loss", patience=1, mode="max"),
        "trainer.max_epochs=4",
        name="EarlyStopping",
    ),
    ddp(Regressor, stock("LearningRateMonitor", log_momentum="true"), name="LearningRateMonitor"),
    fsdp(
        Regressor,
        stock("ModelCheckpoint", monitor="val/loss", save_top_k=2, save_last="true"),
        name="ModelCheckpoint",
        sample=True,
    ),
    ddp(Finetuned, callback(Unfreeze), name="Unfreeze", sample=True),
    fsdp(Finetuned, stock("BackboneFinetuning", unfreeze_backbone_at_epoch=1)),
    fsdp(FinetunedBesideWhole, stock("BackboneFinetuning", unfreeze_backbone_at_epoch=1)),
    fsdp(Regressor, callback(Probe), name="Probe"),
    # the probe is called outside of autocast
    fsdp(
        Regressor,
        "trainer.precision=bf16-mixed",
        callback(Probe),
        name="ProbeBF16",
        **BESIDE_WHOLE,
    ),
    fsdp(Regressor, "trainer.precision=bf16-true", name="BF16", **BESIDE_WHOLE),
    ddp(Regressor, callback(OnlineEvaluator), name="OnlineEvaluator", twice=True),
]
