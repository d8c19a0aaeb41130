"""The gate as a Lightning callback.

`+callbacks.gate._target_=benchmarks.lightning_gate.LightningGate`.
"""

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.gate import COUNT_INTO, Gate

_COUNTED = 3  # the optimizer step whose collectives are counted, after steps that initialize things


class LightningGate(Callback):
    """Put the gate at the end of Lightning's step and remove this callback, which would cost some
    µs per step.
    """

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        gate, loop, accumulate = (
            Gate(),
            trainer.fit_loop.epoch_loop,
            trainer.accumulate_grad_batches,
        )
        end_of_batch = loop.on_advance_end
        batches = 0

        def end_of_batch_and_gate(data_fetcher: Any) -> None:
            nonlocal batches
            end_of_batch(data_fetcher)
            batches += 1
            if batches % accumulate == 0:
                gate.step()

        loop.on_advance_end = end_of_batch_and_gate
        if COUNT_INTO in os.environ:
            _count_a_step(trainer, Path(os.environ[COUNT_INTO]))
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self]


def _count_a_step(trainer: Trainer, file: Path) -> None:
    """Count the communication of the batches of one optimizer step."""
    from benchmarks.volume import CollectiveCounter

    loop, counter, accumulate = (
        trainer.fit_loop.epoch_loop,
        CollectiveCounter(),
        trainer.accumulate_grad_batches,
    )
    advance = loop.advance
    batches = 0

    def advance_and_count(data_fetcher: Any) -> None:
        nonlocal batches
        batches += 1
        if (batches - 1) // accumulate + 1 != _COUNTED:
            advance(data_fetcher)
            return
        with counter:
            advance(data_fetcher)
        if batches % accumulate == 0 and trainer.is_global_zero:
            counter.save(file)

    loop.advance = advance_and_count
