"""Our loops call the same hooks in the same order as Lightning's own."""

import logging

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader

from armature.strategies.single import SingleDevice
from armature.training.trainer import Trainer
from tests.trainers import Squares

HOOKS = [name for name in vars(L.Callback) if name.startswith("on_") and "checkpoint" not in name]
pytestmark = pytest.mark.filterwarnings("ignore:.*many workers.*")


class Recorder(L.Callback):
    """Notes each hook, and what `self.log` would take it for."""

    def __init__(self, into: list[str], name: str, hooks: list[str]) -> None:
        for hook in hooks:
            setattr(self, hook, self._recording(into, name, hook))

    @staticmethod
    def _recording(into, name, hook):
        def record(trainer, module, *args, **kwargs):
            shapes = [
                tuple(a.shape) if isinstance(a, torch.Tensor) else type(a).__name__ for a in args
            ]
            into.append(f"{name} {hook} {module._current_fx_name} {shapes} {kwargs}")

        return record


class Module(Squares):
    def __init__(self, into: list[str]) -> None:
        super().__init__()
        self.into = into

    def training_step(self, batch, batch_idx):
        self.into.append(f"step {batch_idx} {self._current_fx_name}")
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:  # until then nothing is collected
            self.log("train/late", loss.detach(), on_step=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.net(batch).square().mean())

    def on_after_backward(self):
        self.into.append(f"module {self._current_fx_name}")


OURS, LIGHTNINGS = Trainer, L.Trainer


def make(trainer, *callbacks, **kwargs):
    kwargs = {"logger": False, "enable_checkpointing": False, **kwargs}
    if trainer is OURS:
        kwargs["strategy"] = SingleDevice()
    return trainer(
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks],
        **kwargs,
    )


def loaders(size: int = 16) -> tuple[DataLoader, DataLoader]:
    data = torch.randn(size, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(data, batch_size=4), DataLoader(data, batch_size=8)


def run(trainer, *, module=Module, **kwargs) -> tuple[list[str], dict, torch.Tensor]:
    torch.manual_seed(0)
    into: list[str] = []
    callbacks = [
        Recorder(into, "all", HOOKS),
        Recorder(into, "few", ["on_train_batch_end", "on_validation_end"]),
    ]
    trainer = make(
        trainer,
        *callbacks,
        max_epochs=2,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        **kwargs,
    )
    task = module(into)
    trainer.fit(task, *loaders())
    return into, dict(trainer.callback_metrics), torch.cat([p.flatten() for p in task.parameters()])


def test_validation_runs_after_the_last_step_in_the_middle_of_an_epoch():
    into: list[str] = []
    make(
        OURS, Recorder(into, "all", HOOKS), max_steps=3, max_epochs=-1, num_sanity_val_steps=0
    ).fit(Module([]), *loaders())
    assert len([call for call in into if call.startswith("all on_validation_end")]) == 1


@pytest.mark.parametrize("limit", [{"max_steps": 3, "max_epochs": -1}, {"max_epochs": 1}])
def test_the_limit_that_ended_the_run_is_named(limit, caplog, monkeypatch):
    # a run in this process may have silenced it
    remarks = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    monkeypatch.setattr(remarks, "filters", [])
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        make(OURS, **limit).fit(Module([]), *loaders())
    key, value = next(iter(limit.items()))
    assert f"`Trainer.fit` stopped: `{key}={value}` reached." in caplog.text


class Scheduled(Module):
    """Its rate depends on how often its schedule steps."""

    def __init__(self, into, kind: str, frequency: int) -> None:
        super().__init__(into)
        self.kind, self.frequency = kind, frequency

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("followed", 1.0)  # never better
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        if self.kind == "plateau":
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        else:
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        interval = "epoch" if self.kind == "epoch" else "step"
        entry = {
            "scheduler": schedule,
            "interval": interval,
            "frequency": self.frequency,
            "monitor": "followed",
        }
        return [optimizer], [entry]


@pytest.mark.parametrize(
    ("kind", "frequency", "rate"), [("step", 2, 0.5**4), ("plateau", 2, 0.5**3), ("epoch", 2, 0.5)]
)
def test_a_schedule_s_frequency_counts_global_batches_of_any_accumulation(kind, frequency, rate):
    """Two epochs of four global batches; Lightning counts the batches of each epoch from 1."""
    rates = {}
    for accumulate in (1, 2, 4):
        data = torch.randn(16, 4)
        trainer = make(
            OURS,
            accumulate_grad_batches=accumulate,
            max_epochs=2,
            max_global_batches=8,
            limit_val_batches=0,
        )
        loader = DataLoader(data, batch_size=4 // accumulate)
        trainer.fit(Scheduled([], kind, frequency), loader, loader)
        rates[accumulate] = trainer.optimizers[0].param_groups[0]["lr"]
    assert rates == {1: rate, 2: rate, 4: rate}


class ByHand(Module):
    def __init__(self, into):
        super().__init__(into)
        self.automatic_optimization = False


class ReadsLimits(ByHand):
    """Manual optimization, with a schedule over the whole run."""

    def training_step(self, batch, batch_idx):
        self.into.append("step")

    def configure_optimizers(self):
        self.limits = self.trainer.max_steps, self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


@pytest.mark.parametrize(("limit", "limits"), [(3, (3, 3)), (None, (-1, 8))])
def test_a_manual_module_reads_the_limit_of_global_batches(limit, limits):
    module = ReadsLimits([])
    make(OURS, max_epochs=2, max_global_batches=limit, limit_val_batches=0).fit(module, *loaders())
    assert module.limits == limits
    assert module.into == ["step"] * limits[1]


class TakesIterator(Module):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        self.into.append(f"step {batch_idx} {self._current_fx_name}")
        return self.net(batch).square().mean()


class SkipsTheRest(Module):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


class SteppedByHand(ByHand):
    def training_step(self, batch, batch_idx):
        self.into.append(f"step {batch_idx} {self._current_fx_name}")
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(batch).square().mean())
        optimizer.step()


class ReturnsNone(Module):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) if batch_idx % 2 else None


CLIPPED = {"gradient_clip_val": 0.5}


@pytest.mark.filterwarnings(
    "ignore:.*returned `None`.*", "ignore:.*dataloader_iter.*", "ignore:.*bad for performance.*"
)
@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (Module, CLIPPED),
        (Module, {**CLIPPED, "accumulate_grad_batches": 2}),
        (TakesIterator, {}),
        (SkipsTheRest, {}),
        (SteppedByHand, {}),
        (ReturnsNone, {}),
    ],
)
def test_the_same_hooks_are_called_and_the_same_is_learned(module, settings):
    (own_calls, own_metrics, own_weights), (calls, metrics, weights) = (
        run(trainer, module=module, **settings) for trainer in (LIGHTNINGS, OURS)
    )
    assert calls == own_calls
    ended = [text for text in calls if text.startswith("all on_train_batch_end")]
    assert len(ended) == (4 if module is SkipsTheRest else 8)
    assert metrics == own_metrics
    assert ("val/loss" in metrics) == (module is not SkipsTheRest)
    assert torch.equal(weights, own_weights)
