"""FLOPs per step and the machine's rate, counted and measured as monitors do.

python -m benchmarks.flops rate cuda bfloat16     this machine's matrix rate
python -m benchmarks.flops step JOB               FLOPs of an optimizer step over all ranks, or null
"""

import json
import sys
from functools import partial
from typing import Any

import torch

from armature.hardware import cpu_name
from armature.training.flops import flops_per_sample, measured_peak
from benchmarks.job import Job
from benchmarks.parts import call

SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192, 16384)}


def measure(device: str, dtype_name: str) -> dict[str, Any]:
    """Return the best rate of square matrix products on one device, or on all CPUs of this process,
    in FLOP/s.
    """
    torch.set_float32_matmul_precision("high")
    dtype, where = getattr(torch, dtype_name), torch.device(device)
    rates = {
        size: measured_peak(dtype, device=where, size=size, seconds=0.5) for size in SIZES[device]
    }
    name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    return {
        "device": name,
        "dtype": dtype_name,
        "rate": max(rates.values()),
        "rates": rates,
        "torch": torch.__version__,
    }


def step(job: Job) -> float | None:
    """Return FLOPs per step, or None for a model that does not read tokens."""
    if job.tokens is None:
        return None
    tokens = torch.zeros(1, job.context, dtype=torch.long)
    one = flops_per_sample(partial(call, job.model), tokens, tokens)
    return one and one * job.global_batch_size


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    print(json.dumps(measure(*words) if what == "rate" else step(Job.load(words[0]))))
