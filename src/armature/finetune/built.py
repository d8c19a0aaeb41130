"""Compare a folder with the model that transformers builds of it, on the meta device: no process, no memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from armature.finetune import check, folder


class _Reached(Exception):
    """transformers looks for documents in a row."""


def problems(cfg: DictConfig) -> list[str]:
    """Return what is wrong with the folder of a run that begins: an unknown architecture, names and shapes of weights.

    A run that resumes reads its checkpoint: only the model is built.
    """
    try:
        with torch.device("meta"):
            model = instantiate(cfg.model)()
    except (ValueError, ImportError) as error:
        return [f"{str(error).rstrip('.')}."]
    found = [] if check.resumed(cfg) is not None else _weight_problems(model, Path(cfg.model.pretrained))
    return found + _packing_problems(model, cfg)


def _weight_problems(model: Any, path: Path) -> list[str]:
    from armature.models.huggingface.names import match

    weights = folder.weights(path)
    names = match(model.inner, weights.tensors)
    kind, found = type(model.inner).__name__, []
    if names.converted:
        found.append(
            f"{path}: transformers changes {folder.some(names.converted)} while it loads them, which is not done "
            f"here: {kind} cannot be read slice by slice."
        )
        return found
    if missing := [name for name in names.missing if not model.may_be_new(name)]:
        found.append(f"{path}: its files lack {folder.some(missing)}, which {kind} has. Download it again.")
    if surplus := [name for name in names.surplus if not model.may_be_left(name)]:
        found.append(f"{path}: {folder.some(surplus)}: {kind} has no such tensors. Download it again.")
    held = dict(model.inner.named_parameters(remove_duplicate=False)) | dict(model.inner.named_buffers())
    shapes = {own: (weights.tensors[theirs].shape, tuple(held[own].shape)) for own, theirs in names.found.items()}
    if wrong := [f"{own} is {there}, not {here}" for own, (there, here) in shapes.items() if there != here]:
        found.append(f"{path}: config.json and the weights disagree: {folder.some(wrong)}. Download it again.")
    numbers = [own for own in names.found if held[own].is_floating_point()]
    return found + check.type_problems(path, {names.found[n]: weights.tensors[names.found[n]].dtype for n in numbers})


def _packing_problems(model: Any, cfg: DictConfig) -> list[str]:
    """Return whether conversations that are packed into rows would see each other in this architecture.

    transformers keeps them apart by their positions, in a function that only newer code of a model calls.
    """
    if not OmegaConf.select(cfg, "data.source.packing"):
        return []
    ids = torch.zeros(1, 4, dtype=torch.long, device="meta")
    with patch("transformers.masking_utils.find_packed_sequence_indices", side_effect=_Reached):
        try:
            model(ids, documents=ids)
        except _Reached:
            return []
        except Exception as error:  # an architecture that takes no positions, or cannot run without values
            reason = f" ({type(error).__name__})"
        else:
            reason = ""
    return [
        f"data.source.packing=true: transformers' {type(model.inner).__name__} does not keep the conversations of a "
        f"row apart{reason}. Type data.source.packing=false."
    ]
