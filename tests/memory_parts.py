"""A callback that pretends that memory runs out, for runs of the command line."""

import weakref
from typing import ClassVar

import torch
from lightning.pytorch import Callback


class Greedy(Callback):
    """Raises in the model of one rank, from one step on, where a micro-batch has more samples than
    fit.
    """

    modules: ClassVar[list[weakref.ref]] = []  # of this process

    def __init__(self, fits: int, *, step: int = 0, rank: int = 0, training: bool = True) -> None:
        self.fits, self.step, self.rank, self.training = fits, step, rank, training

    def on_fit_start(self, trainer, pl_module):
        assert not any(earlier() for earlier in self.modules), (
            "the module of a failed attempt still holds its memory"
        )
        self.modules.append(weakref.ref(pl_module))

        def check(module, args):
            here = trainer.global_rank == self.rank and trainer.training == self.training
            if here and trainer.global_step >= self.step and len(args[0]) > self.fits:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {len(args[0])} GiB"
                )

        pl_module.model.register_forward_pre_hook(check)
