"""The short way from hook to hook calls the same hooks in the same order as Lightning's own, and is undone."""

from contextlib import nullcontext

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.trainer import call
from torch import nn
from torch.utils.data import DataLoader

from armature.training import dispatch

HOOKS = [name for name in vars(L.Callback) if name.startswith("on_") and "checkpoint" not in name]


class Recorder(L.Callback):
    """Notes each hook, and what `self.log` would take it for."""

    def __init__(self, into: list[str], name: str, hooks: list[str]) -> None:
        for hook in hooks:
            setattr(self, hook, self._recording(into, name, hook))

    @staticmethod
    def _recording(into, name, hook):
        def record(trainer, module, *args, **kwargs):
            shapes = [tuple(a.shape) if isinstance(a, torch.Tensor) else type(a).__name__ for a in args]
            into.append(f"{name} {hook} {module._current_fx_name} {shapes} {kwargs}")

        return record


class Module(L.LightningModule):
    def __init__(self, into: list[str]) -> None:
        super().__init__()
        self.into, self.net = into, nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        self.into.append(f"step {batch_idx} {self._current_fx_name}")
        loss = self.net(batch).square().mean()
        if batch_idx == 2:  # until then nothing is collected
            self.log("train/late", loss.detach(), on_step=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.net(batch).square().mean())

    def on_after_backward(self):
        self.into.append(f"module {self._current_fx_name}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Trainer(L.Trainer):
    short = False

    def _run_stage(self):
        with dispatch.shortened(self) if self.short else nullcontext():
            return super()._run_stage()


def run(short: bool, *, module=Module, **kwargs) -> tuple[list[str], dict, torch.Tensor]:
    torch.manual_seed(0)
    into: list[str] = []
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    trainer = Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=0.5, num_sanity_val_steps=0, log_every_n_steps=1,
        callbacks=[Recorder(into, "all", HOOKS), Recorder(into, "few", ["on_train_batch_end", "on_validation_end"])],
        **kwargs,
    )  # fmt: skip
    trainer.short = short
    task = module(into)
    own = {name: getattr(call, name) for name in dispatch.FUNCTIONS}
    trainer.fit(task, DataLoader(data, batch_size=4), DataLoader(data, batch_size=8))
    assert {name: getattr(call, name) for name in dispatch.FUNCTIONS} == own
    assert "batch_to_device" not in vars(trainer.strategy)
    assert "_on_before_batch_transfer" not in vars(task)
    return into, dict(trainer.callback_metrics), torch.cat([p.flatten() for p in task.parameters()])


@pytest.mark.filterwarnings("ignore:.*many workers.*")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_same_hooks_are_called_and_the_same_is_learned(accumulate):
    own_calls, own_metrics, own_weights = run(False, accumulate_grad_batches=accumulate)
    calls, metrics, weights = run(True, accumulate_grad_batches=accumulate)
    assert calls == own_calls
    assert len([text for text in calls if text.startswith("all on_train_batch_end on_train_batch_end")]) == 8
    assert metrics == own_metrics
    assert {"train/late", "val/loss"} <= set(metrics)
    assert torch.equal(weights, own_weights)


class Own(Module):
    """Has its own way with batches and clipping, and no batch index."""

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.into.append("transfer")
        return batch.to(device) * 2

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.into.append(f"clip {gradient_clip_val}")

    def training_step(self, batch):
        return {"loss": self.net(batch).square().mean(), "other": 1}


@pytest.mark.filterwarnings("ignore:.*many workers.*")
def test_what_a_module_overrides_is_called():
    calls, _, weights = run(True, module=Own)
    assert calls.count("clip 0.5") == 8
    assert calls.count("transfer") == 12
    assert torch.equal(weights, run(False, module=Own)[2])


@pytest.mark.filterwarnings("ignore:.*many workers.*")
def test_a_profiler_sees_everything():
    profiler = SimpleProfiler()
    run(True, profiler=profiler)
    assert any("Recorder" in name and "on_train_batch_end" in name for name in profiler.recorded_durations)


@pytest.mark.filterwarnings("ignore:.*many workers.*")
def test_callbacks_that_come_and_go_are_noticed():
    into: list[str] = []
    trainer = Trainer(
        accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    late = Recorder(into, "late", ["on_train_batch_end"])

    class Adds(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 0:
                trainer.callbacks = [*trainer.callbacks, late]

    trainer.short = True
    trainer.callbacks.append(Adds())
    trainer.fit(Module([]), DataLoader(torch.randn(12, 4), batch_size=4), DataLoader(torch.randn(4, 4)))
    assert len(into) == 2
