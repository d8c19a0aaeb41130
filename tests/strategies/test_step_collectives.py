"""What the ranks tell each other in a step besides weights, gradients and activations: a few small
collectives.
"""

from functools import partial
from typing import Any

import pytest

from tests.support.parity.harness import DECODER, STRATEGIES, import_object, on_ranks
from tests.trainers import quiet_trainer

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


def prepared(layout: str) -> Any:
    """Return a Trainer, and what starts the training."""
    import torch
    from torch.utils.data import DataLoader

    from armature.tasks.base import Task
    from armature.training.stop import StopOnSignal

    name, options = LAYOUTS[layout]
    trainer = quiet_trainer(
        devices=2,
        strategy=import_object(STRATEGIES[name])(seed=3, **options),
        max_steps=COUNTED + 1,
        callbacks=[StopOnSignal()],
        limit_val_batches=0,
        gradient_clip_val=0.5,
    )
    model = partial(import_object("armature.models.decoder.model.Decoder"), **DECODER)
    task = Task(model, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
    tokens = torch.randint(0, DECODER["vocab_size"], (4, DECODER["context"]))
    loader: Any = DataLoader([{"inputs": tokens, "targets": tokens}] * 20, batch_size=None)  # pyright: ignore[reportArgumentType]
    return trainer, partial(trainer.fit, task, loader, loader)


def small_collectives() -> dict[str, list[tuple[str, int]]]:
    """Return (kind, bytes) of the small collectives of a step, by layout."""
    return {layout: _small_collectives(layout) for layout in LAYOUTS}


def _small_collectives(layout: str) -> list[tuple[str, int]]:
    from tests.support.volume import CollectiveCounter

    trainer, fit = prepared(layout)
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
