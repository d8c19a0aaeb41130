"""What users keep in checkpoints: hyperparameters of all kinds, NumPy, edits of the state dict, files of their own."""

import enum
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tests.lightning_habits.regression import Regressor


class Color(enum.Enum):
    RED = "red"


@dataclass
class Settings:
    width: int = 16
    names: tuple[str, ...] = ("a", "b")


class RichHparams(Regressor):
    """Lists, paths, an enum, a dataclass, NumPy and torch values as hyperparameters."""

    def __init__(self, sizes: list[int] | None = None, folder: str = ".", nested: dict | None = None):
        super().__init__()
        path, color, settings = Path(folder), Color.RED, Settings()
        scale, dtype = np.float64(0.5), torch.float32
        self.save_hyperparameters(
            {"sizes": sizes, "path": path, "color": color, "settings": settings, "scale": scale, "nested": nested}
        )
        self.save_hyperparameters({"dtype": str(dtype), "mean": np.arange(3.0)})
        self.hparams.lr = 0.05


class ListHparams(Regressor):
    """A plain save_hyperparameters() over what the configuration gave: lists and dicts of OmegaConf."""

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
        loss = super().training_step((x - torch.tensor(self.mean, dtype=x.dtype, device=x.device), y), batch_idx)
        self.log("count", float(self.count))
        return loss

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mean"], checkpoint["count"], checkpoint["seen"] = self.mean, self.count, self.seen
        checkpoint["best"] = {"score": np.float32(0.5), "path": Path("x"), "kind": Color.RED, "keys": {1, 2}}

    def on_load_checkpoint(self, checkpoint):
        self.mean, self.count, self.seen = checkpoint["mean"], checkpoint["count"], checkpoint["seen"]


class ExtraState(Regressor):
    """torch's get_extra_state of a submodule, beside a buffer that no state dict holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.linspace(0, 1, 8), persistent=False)

    def forward(self, x):
        return self.net(x + 0.01 * self.table)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.steps += 1
        self.log("steps_in_buffer", self.steps.float())


class DropsOnSave(Regressor):
    """A frozen teacher is left out of checkpoints, and put in again on load."""

    def __init__(self):
        super().__init__()
        self.teacher = torch.nn.Linear(8, 1)
        with torch.no_grad():
            self.teacher.weight.copy_(torch.linspace(-1, 1, 8).reshape(1, 8))
            self.teacher.bias.zero_()
        self.teacher.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * (self(x) - self.teacher(x)).square().mean()

    def on_save_checkpoint(self, checkpoint):
        for name in [name for name in checkpoint["state_dict"] if name.startswith("teacher.")]:
            del checkpoint["state_dict"][name]

    def on_load_checkpoint(self, checkpoint):
        for name, value in self.teacher.state_dict().items():
            checkpoint["state_dict"][f"teacher.{name}"] = value


class Renames(Regressor):
    """Weights are renamed in on_load_checkpoint: none here has the old name, and all must stay as they are."""

    def on_load_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        for name in list(state):
            state[name.replace("old_net.", "net.")] = state.pop(name)


class Halves(Regressor):
    """Reads its weights in on_save_checkpoint, as loggers of statistics do."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["norm"] = float(sum(v.float().norm() for v in self.state_dict().values()))
        checkpoint["names"] = list(checkpoint["state_dict"])


class SavesItself(Regressor):
    """torch.save of the module, of its state and of a deep copy within hooks."""

    def on_train_epoch_end(self):
        folder = Path(self.trainer.default_root_dir)
        if self.trainer.is_global_zero:
            torch.save(self, folder / "module.pt")
            torch.save(self.net.state_dict(), folder / "net.pt")


class SavesCheckpoint(Regressor):
    """trainer.save_checkpoint in a hook."""

    def on_validation_end(self):
        self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "mine.ckpt")


class SavesWeightsOnly(Regressor):
    def on_train_epoch_end(self):
        name = f"epoch{self.current_epoch}.ckpt"
        self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / name, weights_only=True)
