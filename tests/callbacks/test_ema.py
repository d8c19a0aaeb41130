"""The moving average against torch's own, and its file."""

from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from armature.callbacks.ema import EMA
from armature.checkpoint import convert
from tests.trainers import quiet_trainer

DECAY = 0.05  # below 1/10, with which an average of ours begins


class Normalized(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.net(x).square().mean()

    def validation_step(self, x: Tensor, batch_idx: int) -> None:
        self.net(x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.1)


class Torchs(L.Callback):
    """Torch's average beside ours, and what the model holds while it is validated."""

    def __init__(self) -> None:
        self.validated, self.expected = list[dict[str, Tensor]](), list[dict[str, Tensor]]()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        average = get_ema_multi_avg_fn(DECAY)
        self.average = AveragedModel(pl_module.net, multi_avg_fn=average)
        self.average.n_averaged += 1  # else the first step would be copied

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        self.average.update_parameters(pl_module.net)  # pyright: ignore[reportArgumentType]

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        for kept, net in ((self.validated, pl_module.net), (self.expected, self.average.module)):
            kept.append(
                {
                    name: value.clone()
                    for name, value in net.state_dict().items()
                    if "num" not in name
                }
            )


def fit(ema: EMA, *others: L.Callback) -> L.Trainer:
    L.seed_everything(0, verbose=False)
    trainer = quiet_trainer(max_epochs=2, callbacks=[ema, *others])
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(1)) + 3
    loader = DataLoader(data, batch_size=8)  # pyright: ignore[reportArgumentType]
    trainer.fit(Normalized(), loader, loader)
    return trainer


@pytest.mark.filterwarnings("ignore")
def test_validation_sees_torchs_average_and_the_models_buffers():
    torchs = Torchs()
    fit(EMA(decay=DECAY), torchs)
    assert len(torchs.validated) == 8
    torch.testing.assert_close(torchs.validated, torchs.expected)


@pytest.mark.filterwarnings("ignore")
def test_a_file_of_the_average_has_the_models_buffers(tmp_path):
    ema = EMA(decay=DECAY)
    trainer = fit(ema)
    trainer.save_checkpoint(tmp_path / "step=000008")
    convert.to_safetensors(tmp_path / "step=000008", tmp_path / "average.safetensors", average=True)
    written = load_file(tmp_path / "average.safetensors")
    module = trainer.lightning_module
    assert written.keys() == module.state_dict().keys()
    torch.testing.assert_close(
        written["net.1.running_mean"], module.get_buffer("net.1.running_mean")
    )
    torch.testing.assert_close(written["net.0.weight"], ema.average["net.0.weight"])


def test_all_names_of_a_tied_weight_are_averaged(tmp_path, monkeypatch):
    weight, average = torch.randn(2, 2), torch.randn(2, 2)
    saved = {
        "embed": weight,
        "head": weight.clone(),
        "mean": torch.zeros(2),
        "bias": torch.zeros(2, dtype=torch.int64),
    }
    averages = {"embed": average, "mean": torch.ones(2)}
    monkeypatch.setattr(
        convert.state, "load_full_state_dict", lambda path, prefix="": averages if prefix else saved
    )
    found = convert.weights_of(tmp_path, average=True)
    assert found["embed"].equal(average)
    assert found["head"].equal(average)
    assert found["bias"] is saved["bias"]
