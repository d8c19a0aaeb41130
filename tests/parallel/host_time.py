"""The host's time for a block's forward and backward, by layout, on groups that send nothing.

PYTHONPATH=src python -m tests.parallel.host_time prints CPU milliseconds per block and their ratio
to a block on one device: medians of steps in turn. On a GPU a layout is bound by its host where
that is longer than the block's kernels take.
"""

import time
from math import prod
from statistics import median

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from armature.models.decoder.model import Decoder
from tests.parallel.building import decoder_on_meta, parallelize

LAYOUTS = {
    "plain": {},
    "fsdp 8": {"shard": 8},
    "tensor 8": {"tensor": 8},
    "fsdp 4 × tensor 8": {"shard": 4, "tensor": 8},
}
LAYERS, STEPS = 12, 30
MODEL = {"vocab_size": 64, "context": 16, "width": 64, "heads": 8, "ffn_hidden": 128}


def built(axes: dict[str, int], **options: str) -> Decoder:
    if not axes:
        return Decoder(**MODEL, layers=LAYERS)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=prod(axes.values()), store=FakeStore())
    model = decoder_on_meta(**MODEL, layers=LAYERS)
    parallelize(model, axes=axes, **options)
    return model


def step(model: Decoder) -> float:
    ids = torch.zeros(1, 17, dtype=torch.long)
    begin = time.process_time()
    model(ids[:, :-1], ids[:, 1:]).backward()
    passed = time.process_time() - begin
    model.zero_grad()
    return 1000 * passed / LAYERS


def measure(name: str) -> tuple[float, float]:
    """Return CPU milliseconds per block under a layout, and without one."""
    torch.set_num_threads(1)
    models = built({}), built(LAYOUTS[name])
    times: list[list[float]] = [[], []]
    for _ in range(STEPS):
        for model, taken in zip(models, times, strict=True):
            taken.append(step(model))
    plain, layout = (median(each[5:]) for each in times)
    return layout, plain


if __name__ == "__main__":
    for name in LAYOUTS:
        took, plain = measure(name)
        print(f"{name:20} {took:6.2f} ms  {took / plain:5.2f} × {plain:.2f} ms without a layout")
