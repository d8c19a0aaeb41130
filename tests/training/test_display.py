"""What is printed while training: a module's own values stand beside ours, and a bar of the user's
replaces ours.
"""

from types import SimpleNamespace

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar
from torch.utils.data import DataLoader
from torchmetrics import CatMetric

from armature.training.display import Bar, Display
from tests.trainers import Squares, quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*many workers.*")


class Module(Squares):
    def __init__(self) -> None:
        super().__init__()
        self.each = CatMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("mine", 0.25 + batch_idx, prog_bar=True)
        self.log("hidden", 1.0)
        self.log(
            "train/loss", loss, prog_bar=True
        )  # the bar shows the loss of the whole global batch
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/score", 0.5, prog_bar=True)
        self.log("val_loss", 0.25)
        self.each(batch)
        self.log("val/each", self.each, logger=False)  # several numbers

    def test_step(self, batch, batch_idx, dataloader_idx):
        pass


def fit(display: Display, *callbacks: L.Callback) -> None:
    last = {"train/loss": 2.0, "lr": 0.1}
    display.step_log = SimpleNamespace(last=last, tokens_per_sample=None, rate=10.0, data_wait=0.0)  # pyright: ignore
    trainer = quiet_trainer(max_epochs=1, enable_progress_bar=True, callbacks=[display, *callbacks])
    data = torch.ones(8, 4)
    module = Module()
    trainer.fit(module, DataLoader(data, batch_size=4), DataLoader(data, batch_size=2))
    trainer.test(
        module, [DataLoader(data, batch_size=4), DataLoader(data, batch_size=8)], verbose=False
    )


def lines_of(capsys, *, every: float) -> list[str]:
    fit(Bar(lambda trainer: "start", step_log=None, total_steps=2, plain_every=every))  # pyright: ignore
    return capsys.readouterr().err.splitlines()


def test_values_logged_for_the_bar_are_shown(capsys):
    lines = lines_of(capsys, every=0.0)
    assert lines[0] == "start"
    steps = [line for line in lines if "samples/s" in line]
    assert [line.split("samples/s")[1].split()[:2] for line in steps] == [
        ["mine", "0.25"],
        ["mine", "1.25"],
    ]
    assert not any("hidden" in line for line in lines)
    assert [line for line in lines if "val/score" in line] == [
        "step 2/2 val/score 0.5000 val_loss 0.2500"
    ]
    assert all(line.count("loss") == 1 for line in steps)


@pytest.mark.parametrize(("seconds", "shown"), [(0.0, True), (60.0, False)])
def test_an_evaluation_that_takes_long_shows_how_far_it_is(capsys, seconds, shown):
    found = [line for line in lines_of(capsys, every=seconds) if " batch " in line]
    expected = [*(f"validation batch {i}/4" for i in (1, 2, 3, 4)), "test batch 1/2 of loader 0"]
    assert found == (
        [*expected, "test batch 2/2 of loader 0", "test batch 1/1 of loader 1"] if shown else []
    )


def test_another_bar_takes_the_place_of_ours(capsys):
    fit(Display(lambda trainer: "start"), RichProgressBar())
    printed = capsys.readouterr()
    assert "start" in printed.err
    assert "Linear" in printed.err
    assert "samples/s" not in printed.err
    assert "mine: 1.250" in printed.out
