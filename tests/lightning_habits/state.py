"""What users keep in checkpoints: hyperparameters, NumPy, edited state dicts, own files."""

import enum
from pathlib import Path

import numpy as np
import torch

import armature
from tests.lightning_habits.habit import SAVED, ddp, fsdp
from tests.lightning_habits.regression import Regressor


class Color(enum.Enum):
    RED = "red"


class ListHparams(Regressor):
    """A plain save_hyperparameters() over what the configuration gave: lists and dicts of
    OmegaConf.
    """

    def __init__(self, sizes=None, betas=(0.9, 0.99), lr: float = 0.05, options=None):
        super().__init__(lr=lr)
        self.save_hyperparameters()
        assert list(self.hparams.sizes) == [16, 8]


class NumpyState(Regressor):
    """A running mean in NumPy, kept in the checkpoint."""

    def __init__(self):
        super().__init__()
        self.mean, self.count, self.seen = np.zeros(8), np.int64(0), []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.count += 1
        gathered = self.all_gather(x.mean(0)).reshape(-1, 8).mean(0)
        self.mean += (gathered.cpu().numpy() - self.mean) / self.count
        self.seen.append(int(self.count))
        self.log("count", float(self.count))
        return super().training_step((x - torch.tensor(self.mean).to(x), y), batch_idx)

    def on_save_checkpoint(self, checkpoint):
        checkpoint.update(mean=self.mean, count=self.count, seen=self.seen)
        checkpoint["best"] = {"score": np.float32(0.5), "kind": Color.RED, "keys": {1, 2}}

    def on_load_checkpoint(self, checkpoint):
        self.mean, self.count = checkpoint["mean"], checkpoint["count"]
        self.seen = checkpoint["seen"]


class Frozen(Regressor):
    """A frozen part, which every start makes the same."""

    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
        self.frozen.weight.copy_(torch.eye(8))
        self.frozen.bias.fill_(0.1)

    def forward(self, x):
        return self.net(self.frozen(x))

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)


class DropsOnSave(Frozen):
    """The frozen part is left out of checkpoints, and put in again on load."""

    def on_save_checkpoint(self, checkpoint):
        for name in [name for name in checkpoint["state_dict"] if name.startswith("frozen.")]:
            del checkpoint["state_dict"][name]

    def on_load_checkpoint(self, checkpoint):
        for name, value in self.frozen.state_dict().items():
            checkpoint["state_dict"][f"frozen.{name}"] = value


class SavesItself(Regressor):
    """torch.save of the module and of its state within a hook."""

    def on_train_epoch_end(self):
        folder = Path(self.trainer.default_root_dir)
        if self.trainer.is_global_zero:
            torch.save(self, folder / "module.pt")
            torch.save(self.net.state_dict(), folder / "net.pt")


class SavesWhole(Regressor):
    """The whole weights, under any strategy."""

    def on_train_epoch_end(self):
        weights, total = armature.full_state_dict(self, prefix="net."), 0.0
        if self.trainer.is_global_zero:
            net = Regressor().net
            net.load_state_dict(weights)
            total = float(sum(param.double().norm() for param in net.parameters()))
        self.log("norm_of_file", self.trainer.strategy.broadcast(total))


class SavesCheckpoint(Regressor):
    """trainer.save_checkpoint in a hook."""

    def on_validation_end(self):
        self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "mine.ckpt")


class OwnStateDict(Frozen):
    """Lightning's recipe for LoRA: state_dict leaves it out, with strict_loading off."""

    strict_loading = False

    def state_dict(self, *args, **kwargs):
        return {k: v for k, v in super().state_dict(*args, **kwargs).items() if "frozen" not in k}


class PerRank(Regressor):
    """What a rank has seen, in a tensor of its own: each rank's is another."""

    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(8)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen = 0.9 * self.seen.to(x) + 0.1 * x.mean(0)
        return super().training_step((x - self.seen, y), batch_idx)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint["seen"]


HABITS = [
    ddp(ListHparams, "+task.sizes=[16,8]", "+task.options={deep:[1,{x:2}]}"),
    ddp(NumpyState, resume=SAVED, sample=True),
    fsdp(DropsOnSave),
    ddp(SavesItself),
    fsdp(SavesWhole),
    ddp(SavesCheckpoint),
    fsdp(OwnStateDict, twice=True),
    ddp(PerRank, random=True),
]
