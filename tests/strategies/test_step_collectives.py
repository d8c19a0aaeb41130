"""What the ranks tell each other in a step besides weights, gradients and activations: a few small
collectives.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest

from tests.support.parity.harness import DECODER, STRATEGIES, import_object, on_ranks

SMALL = 64  # bytes: what is sent besides weights, gradients and activations
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("DDP", {}),
    "fsdp": ("MeshStrategy", {"shard": 2, "min_num_params": 0}),
    "tensor": ("MeshStrategy", {"tensor": 2, "sequence_parallel": False}),
    "pipeline": ("MeshStrategy", {"pipe": 2, "microbatches": 2}),
}
STOP = ("all_reduce", 16)  # the wish to stop
TARGETS, SQUARES = ("all_reduce", 4), ("all_reduce", 4)  # squares of sharded gradients
EXPECTED = {
    "ddp": [TARGETS, STOP],
    "fsdp": [TARGETS, SQUARES, STOP],
    "tensor": [SQUARES, STOP],
    "pipeline": [("broadcast", 4), SQUARES, STOP],  # the loss, of the last stage
}
COUNTED = 3  # the step, after those that initialize things


def prepared(layout: str, *callbacks: L.Callback, steps: int = COUNTED + 1) -> Any:
    """Return a Trainer, its `StopOnSignal`, and what starts the training."""
    import torch
    from torch.utils.data import DataLoader

    from armature.tasks.base import Task
    from armature.training.stop import StopOnSignal
    from armature.training.trainer import Trainer

    name, options = LAYOUTS[layout]
    stop = StopOnSignal()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=import_object(STRATEGIES[name])(seed=3, **options),
        max_steps=steps,
        callbacks=[*callbacks, stop],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
        gradient_clip_val=0.5,
    )
    model = partial(import_object("armature.models.decoder.model.Decoder"), **DECODER)
    task = Task(model, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
    tokens = torch.randint(0, DECODER["vocab_size"], (4, DECODER["context"]))
    loader: Any = DataLoader([{"inputs": tokens, "targets": tokens}] * 20, batch_size=None)  # pyright: ignore[reportArgumentType]
    return trainer, stop, partial(trainer.fit, task, loader, loader)


def small_collectives() -> dict[str, list[tuple[str, int]]]:
    """Return (kind, bytes) of the small collectives of a step, by layout."""
    return {layout: _small_collectives(layout) for layout in LAYOUTS}


def _small_collectives(layout: str) -> list[tuple[str, int]]:
    from tests.support.volume import CollectiveCounter

    trainer, _, fit = prepared(layout)
    loop, counter = trainer.fit_loop.epoch_loop, CollectiveCounter()
    advance, end = loop.advance, loop.on_advance_end

    def advance_and_count(data_fetcher: Any) -> None:
        if loop.batch_idx + 1 == COUNTED:
            counter.__enter__()
        advance(data_fetcher)

    def end_and_count(data_fetcher: Any) -> None:
        end(data_fetcher)
        if loop.batch_idx == COUNTED:
            counter.__exit__(None, None, None)

    loop.advance, loop.on_advance_end = advance_and_count, end_and_count
    fit()
    return [(each["kind"], each["bytes"]) for each in counter.collectives if each["bytes"] <= SMALL]


@pytest.mark.slow
def test_what_ranks_agree_on_in_a_step_travels_in_few_collectives():
    for found in on_ranks(small_collectives, ranks=2):
        assert found == EXPECTED


class Signals(L.Callback):
    """Sends each rank's signals to its handler, at a hook of step 5 (counted from 1)."""

    def __init__(self, hook: str, *signals: int | None) -> None:
        self.signals = signals
        setattr(self, hook, self._send)

    def _send(self, trainer: Any, *args: Any) -> None:
        number = self.signals[trainer.global_rank]
        if trainer.fit_loop.epoch_loop.batch_idx == 4 and number is not None:
            trainer.callbacks[-1]._handle(number, None)


def stops() -> dict[str, tuple[int, str | None]]:
    """Return after how many steps this rank stopped, and why, by case."""
    term, usr1 = signal.SIGTERM, signal.SIGUSR1
    cases = {
        "ddp, in forward": ("ddp", Signals("on_train_batch_start", None, term)),
        "ddp, after backward": ("ddp", Signals("on_after_backward", None, term)),
        "ddp, two signals": ("ddp", Signals("on_train_batch_start", usr1, term)),
        "fsdp, after backward": ("fsdp", Signals("on_after_backward", None, term)),
        "fsdp, after the step": ("fsdp", Signals("on_train_batch_end", term, None)),
        "fsdp, nobody": ("fsdp", Signals("on_train_batch_end", None, None)),
    }
    return {name: _stop(layout, callback) for name, (layout, callback) in cases.items()}


def _stop(layout: str, callback: L.Callback) -> tuple[int, str | None]:
    from armature.training.stop import StoppedBySignal

    trainer, stop, fit = prepared(layout, callback, steps=8)
    with suppress(StoppedBySignal):
        fit()
    return trainer.global_step, stop.received


@pytest.mark.slow
def test_ranks_stop_after_the_step_of_the_signal():
    for found in on_ranks(stops, ranks=2):
        assert found == {
            "ddp, in forward": (5, "SIGTERM"),
            "ddp, after backward": (5, "SIGTERM"),
            "ddp, two signals": (5, "SIGUSR1"),
            "fsdp, after backward": (5, "SIGTERM"),
            "fsdp, after the step": (5, "SIGTERM"),
            "fsdp, nobody": (8, None),
        }
