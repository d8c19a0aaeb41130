"""Callbacks with mistakes that hang on GPUs."""

import lightning.pytorch as L
import torch
import torch.distributed as dist


class LeaveOut(L.Callback):
    """Reduce a number on all ranks but rank 1."""

    def on_before_zero_grad(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ):
        if trainer.global_rank != 1:
            dist.all_reduce(torch.zeros(3, device=pl_module.device))


class StopLate(L.Callback):
    """Stop all ranks at a condition that never holds."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: object):
        if trainer.global_step > 1_000_000:
            trainer.should_stop = True


class SendFirst(L.Callback):
    """Let both ranks send before they receive."""

    def on_before_zero_grad(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ):
        x, other = torch.zeros(3, device=pl_module.device), 1 - trainer.global_rank
        dist.send(x, other)
        dist.recv(x, other)
