"""What frozen weights of 4 bits (`task.adapter.quantize`) cannot be combined with. Torch-free."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from armature.checkpoint import resume
from armature.finetune.check import DECODER, adapter_of
from armature.layout import Layout
from armature.models.decoder.check import ffn_hidden_of

KEY = "task.adapter.quantize"
BLOCK = 64  # elements of a row that share a scale (`finetune.nf4`)
INTEGERS_ARE_SHARDED = (2, 12)  # the first torch whose fully_shard takes weights that are no floats
REFUSED = {  # kinds of layout → what is in the way
    "pipeline": "a pipeline with weights of 4 bits has not been tried. Type strategy=fsdp, or "
    "strategy=tensor",
    "deepspeed": "DeepSpeed makes one type of all weights. Type strategy=ddp, or strategy=fsdp",
}


def problems(cfg: Mapping[str, Any], layout: Layout) -> list[str]:
    """Return all that would fail, from the whole configuration, resolved, as plain types."""
    adapter = adapter_of(cfg) or {}
    if (value := adapter.get("quantize")) is None:
        return []
    typed = f"{KEY}={value}"
    model = cfg.get("model") or {}
    if (target := model.get("_target_")) != DECODER:
        return [
            f"{typed} has been tried with {DECODER} alone, and model._target_={target}. Type "
            f"{KEY}=null."
        ]
    named = cfg.get("resume") or "auto"
    unread = model.get("pretrained") is None and named not in resume.MODES
    if unread and resume.run_of(resume.to_path(str(named))) is None:
        return [
            f"{typed} with resume={named}: weights are quantized while they are read from "
            "model.pretrained, not from a checkpoint. Write a folder (python scripts/convert.py "
            f"RUN FOLDER) and type model.pretrained=FOLDER, or type {KEY}=null."
        ]
    found = [
        f"{typed} does not work with this strategy ({m}): {REFUSED[m]}."
        for m in layout.methods
        if m in REFUSED
    ]
    if layout.options.get("compile", "none") != "none":
        found.append(
            f"{typed} with strategy.compile={layout.options['compile']}: the compiler would keep "
            "each dense matrix from forward to backward. Type strategy.compile=none."
        )
    if "shard" in layout.methods and torch_version() < INTEGERS_ARE_SHARDED:
        needed, here = (
            ".".join(map(str, version)) for version in (INTEGERS_ARE_SHARDED, torch_version())
        )
        found.append(
            f"{typed} with a sharded strategy needs torch {needed}; here is {here}, which shards "
            "floats only. Type pip install -U torch, or strategy=ddp, or strategy=tensor."
        )
    return found + _size_problems(model, layout.axes["tensor"], typed=typed)


def _size_problems(model: Mapping[str, Any], tensor: int, *, typed: str) -> list[str]:
    """Return the sizes whose rows do not consist of whole blocks on every rank of the tensor
    axis.
    """
    heads = model["heads"] * (model.get("head_dim") or model["width"] // model["heads"])
    hidden = model.get("ffn_hidden") or ffn_hidden_of(model["width"])
    whole = {
        "model.width": model["width"],
        "model.heads × head_dim": heads,
        "model.ffn_hidden": hidden,
    }
    if odd := [f"{name}={size}" for name, size in whole.items() if size % BLOCK]:
        return [
            f"{typed} holds rows in blocks of {BLOCK} elements, which do not divide "
            f"{', '.join(odd)}. Type {KEY}=null."
        ]
    del whole["model.width"]  # rows of the others are divided
    if odd := [f"{name}={size}" for name, size in whole.items() if size % (BLOCK * tensor)]:
        return [
            f"{typed}: strategy.tensor={tensor} does not give each rank whole blocks of {BLOCK} "
            f"elements of {', '.join(odd)}. Type strategy=fsdp, or another number of tensor ranks."
        ]
    return []


def torch_version() -> tuple[int, int]:
    major, minor, *_ = importlib.metadata.version("torch").split(".")
    return int(major), int(minor)
