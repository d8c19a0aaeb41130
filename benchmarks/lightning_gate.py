"""The gate as a Lightning callback.

`+callbacks.gate._target_=benchmarks.lightning_gate.LightningGate`.
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule

from benchmarks.gate import Gate


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
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self]
