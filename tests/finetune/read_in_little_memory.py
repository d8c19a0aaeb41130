"""Reads a small and a big folder, sharded over all ranks, and adds adapters.

Prints the peak of anonymous memory for the big one, as a multiple of a rank's share of its
parameters. Mapped files do
not count: the kernel drops them when memory is short. Started by forks.
"""

import gc
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from armature.checkpoint import huggingface
from armature.finetune import architecture, folder
from armature.finetune.lora import Lora
from tests.parallel.building import decoder_on_meta, parallelize


def anonymous_bytes() -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )
    return int(line.split()[1]) << 10


def read(path: Path) -> nn.Module:
    args = architecture.arguments(folder.config(path), name=str(path))
    model = decoder_on_meta(**args, context=64, pretrained=str(path))
    Lora(rank=8).add_to(model)
    names = huggingface.imported_names(model)
    parallelize(model, axes={"shard": dist.get_world_size()}, imported=names)
    huggingface.read(model, names)
    return model


def main() -> None:
    torch.set_num_threads(1)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    small, big = map(Path, sys.argv[1:])
    read(small)  # imports and allocates what every process does once
    gc.collect()
    before, peak, ended = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not ended.is_set():
            peak[0] = max(peak[0], anonymous_bytes())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = read(big)
    ended.set()
    watcher.join()
    share = sum(param.numel() for param in model.parameters()) * 4 / dist.get_world_size()
    os.write(1, f"{(peak[0] - before) / share:.3f}\n".encode())  # at once: both ranks write
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
