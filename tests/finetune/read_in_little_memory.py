"""Reads a folder under two ranks, and prints the peak of a rank's anonymous memory in shares of the model.

Mapped files do not count: the kernel drops them when memory is short. Started by forks.
"""

import gc
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from armature.checkpoint import huggingface
from armature.finetune import architecture, folder
from tests.parallel.building import decoder_on_meta, parallelize


def anonymous_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def main() -> None:
    path = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    args = architecture.arguments(folder.config(path), name=str(path))
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.is_set():
            peak[0] = max(peak[0], anonymous_bytes())
            time.sleep(0.002)

    for measured in (False, True):  # the first reading imports and allocates what every process does once
        gc.collect()
        before = anonymous_bytes()
        model = decoder_on_meta(**args, context=64, pretrained=str(path))
        names = huggingface.imported_names(model)
        watcher = threading.Thread(target=watch)
        if measured:
            peak[0] = 0
            watcher.start()
        parallelize(model, axes={"shard": 2}, imported=names)
        huggingface.read(model, names)
        share = sum(param.numel() for param in model.parameters()) * 4 / 2
        if not measured:
            del model
            gc.collect()
    ended.set()
    watcher.join()
    print(f"{(peak[0] - before) / share:.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
