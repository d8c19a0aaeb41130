"""Every family's folder, read under every layout of so many ranks: rank 0 writes the logits.

Started by forks.

read_under_layouts.py FOLDERS OUT LAYOUT…    a layout is axis=size,…
"""

import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from armature.checkpoint import huggingface
from armature.finetune import architecture, folder
from armature.parallel import initialization
from armature.parallel.whole_weights import whole
from tests.finetune.reference import FAMILIES, ids
from tests.parallel.building import decoder_on_meta, parallelize


def logits_of(path: Path, axes: dict[str, int]) -> torch.Tensor:
    args = architecture.arguments(folder.config(path), name=str(path))
    model = decoder_on_meta(**args, context=48, pretrained=str(path))
    names = huggingface.imported_names(model)
    if axes:
        parallelize(model, axes=axes, imported=names)
    else:
        initialization.materialize(model, device=torch.device("cpu"))
    huggingface.read(model, names)
    with torch.no_grad():
        return whole(model.eval()(ids()))


def main() -> None:
    folders, out, *layouts = sys.argv[1:]
    torch.set_num_threads(1)
    several = any(layouts)
    if several:
        dist.init_process_group("gloo")
    found = {}
    for layout in layouts:
        axes = {
            axis: int(size)
            for axis, size in (each.split("=") for each in layout.split(",") if each)
        }
        for name in FAMILIES:
            found[f"{name} {layout}"] = logits_of(Path(folders) / name, axes)
    if not several or dist.get_rank() == 0:
        save_file(found, out)
    if several:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
