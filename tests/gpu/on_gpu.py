"""Where the tests of a GPU run, what they share, and a callback that watches for waits of the
host.
"""

import os
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from armature import hardware

GPUS = hardware.gpu_count()
ACCELERATOR = os.environ.get("ARMATURE_GPU_TESTS_ON", "gpu")
COMMON = ("scheduler=constant", "trainer.log_every_n_steps=1", "trainer.matmul_precision=highest")
PACKAGES = "launch.allowed_packages=[armature,torch.optim,lightning.pytorch,tests]"


def needs(gpus: int) -> pytest.MarkDecorator:
    there = f"{GPUS} GPU here, {gpus} are needed" if GPUS else "no GPU here"
    return pytest.mark.skipif(ACCELERATOR == "gpu" and gpus > GPUS, reason=there)


needs_cuda = pytest.mark.skipif(ACCELERATOR != "gpu", reason="it asks CUDA itself")


class NoWait(Callback):
    """Raise an error where the host waits for the GPU, from the fourth step to the eighth.

    DDP waits once, in the second step: it makes its buckets anew.
    """

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        step = batch_idx // trainer.accumulate_grad_batches
        torch.cuda.set_sync_debug_mode("error" if 3 <= step < 8 else "default")

    def on_train_end(self, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    on_exception = on_train_end


class SmallGpu(Callback):
    """Let this process have `gib` GiB of the GPU."""

    def __init__(self, gib: float) -> None:
        self.gib = gib

    def setup(self, *args: Any, **named: Any) -> None:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(self.gib * 2**30 / whole)
