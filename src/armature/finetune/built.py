"""Compare a folder with the model that another library builds of it, on the meta device: no
process, no memory.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from omegaconf import DictConfig, OmegaConf

from armature.errors import ConfigError
from armature.finetune import check, folder, others
from armature.validation.composing import instantiate

log = logging.getLogger(__name__)


class _Reached(Exception):
    """transformers looks for documents in a row."""


def problems(cfg: DictConfig) -> list[str]:
    """Return what is wrong with the folder of a run that begins: an unknown architecture, names and
    shapes of weights.

    A run that resumes reads its checkpoint: only the model is built.
    """
    if found := _kernel_problems(cfg):
        return found
    try:
        model = build(cfg.model)
    except ConfigError as error:
        return error.problems
    found = []
    if check.resumed(cfg) is None:
        found = weight_problems(model) or _frozen_problems(model, cfg)
    if not check.is_of_transformers(cfg):
        _warn_of_normalization(cfg)
    if (longest := positions(model)) is not None and model.context > longest:
        found.append(
            f"model.context={model.context}, but model.pretrained={model.pretrained} has positions "
            f"for {longest} "
            f"tokens: type data.context={longest} or less."
        )
    return found + _packing_problems(model, cfg)


def build(node: Any, **changes: Any) -> Any:
    """Return the model of a configuration's node, on the meta device.

    Raises ConfigError if its library cannot.
    """
    try:
        with torch.device("meta"):
            return instantiate(node, **changes)()
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{str(error).rstrip('.')}.") from error


def weight_problems(model: Any) -> list[str]:
    """Return what is wrong with the weights that a model on the meta device would read: files,
    names, shapes, types.
    """
    path = Path(model.pretrained)
    weights = folder.weights(path)
    if weights.problems:
        return [*weights.problems]
    names = model.match(weights.tensors)
    kind, found = type(model.inner).__name__, []
    if missing := [name for name in sorted(names.missing) if not model.may_be_new(name)]:
        found.append(
            f"{path}: its files lack {folder.some(missing)}, which {kind} has. Download it again."
        )
    if surplus := [name for name in names.surplus if not model.may_be_left(name)]:
        found.append(
            f"{path}: {folder.some(surplus)}: {kind} has no such tensors. Download it again."
        )
    shapes = {own: both for own, both in names.wrong.items() if not model.begins_anew(own)}
    if head := [
        own
        for own, (there, here) in shapes.items()
        if there[1:] == here[1:] and model.may_be_new(own)
    ]:
        found += _head_problems(path, {own: shapes.pop(own) for own in head})
    if wrong := [f"{own} is {there}, not {here}" for own, (there, here) in shapes.items()]:
        found.append(
            f"{path}: config.json and the weights disagree: {folder.some(wrong)}. Download it "
            "again."
        )
    return found


def _head_problems(
    path: Path, shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
) -> list[str]:
    """Return what is wrong with the head of a folder whose classes are those of other data."""
    wrong = {own: (there[0], here[0]) for own, (there, here) in shapes.items() if there != here}
    if not wrong:
        return []
    own, (there, here) = next(iter(wrong.items()))
    return [
        f"model.classes={here}, but the head of model.pretrained={path} ({own}) tells {there} "
        "classes apart. Type "
        f"model.classes={there}, or model.new_head=true for a head that begins at random."
    ]


def _frozen_problems(model: Any, cfg: DictConfig) -> list[str]:
    """Say which parameters begin at random. Return a problem if adapters would leave them so."""
    missing = model.match(folder.weights(Path(model.pretrained)).tensors).missing
    held = (name for name, _ in model.inner.named_parameters(remove_duplicate=False))
    new = [name for name in held if name in missing or model.begins_anew(name)]
    if not new:
        return []
    log.info("model.pretrained=%s: %s begin at random.", cfg.model.pretrained, folder.some(new))
    if (node := check.adapter_of(cfg)) is None:
        return []
    try:
        instantiate(node).add_to(model)
    except ConfigError:
        return []  # `plan_check.adapter_problems` says it
    frozen = [name for name in new if not model.get_parameter(f"inner.{name}").requires_grad]
    modules = sorted({name.rpartition(".")[0] for name in frozen})
    return [
        f"task.adapter.train={list(node.get('train') or [])}: {folder.some(frozen)} begin at "
        "random, and would stay "
        f"so. Type task.adapter.train=[{','.join(modules)}]."
    ] * bool(frozen)


def positions(model: Any) -> int | None:
    """Return the length of a model's table of positions, if it has one.

    RoBERTa does not use its first rows.
    """
    for name, module in model.inner.named_modules():
        if name.endswith(("position_embeddings", "wpe")) and isinstance(module, torch.nn.Embedding):
            return module.num_embeddings - (
                0 if module.padding_idx is None else module.padding_idx + 1
            )
    return None


def _warn_of_normalization(cfg: DictConfig) -> None:
    known = others.normalization(folder.config(Path(cfg.model.pretrained)))
    given = {key: list(cfg.data[key]) for key in known if cfg.data.get(key) is not None}
    if other := [key for key in given if given[key] != known[key]]:
        log.warning(
            "model.pretrained=%s was trained with %s. Type %s.", cfg.model.pretrained,
            " and ".join(f"{key}={known[key]} (data.{key}={given[key]})" for key in other),
            " ".join(f"data.{key}={known[key]}".replace(" ", "") for key in other),
        )  # fmt: skip


def _kernel_problems(cfg: DictConfig) -> list[str]:
    """Return a problem if conversations are packed for a kernel that keeps them apart only in
    batches of one row.
    """
    if not check.is_of_transformers(cfg) or not OmegaConf.select(cfg, "data.source.packing"):
        return []
    kernel = cfg.model.get("attention") or folder.config(Path(cfg.model.pretrained)).get(
        "attn_implementation"
    )
    if not str(kernel).startswith("flash_attention"):
        return []
    return [
        f"model.attention={kernel} with data.source.packing=true: this kernel of transformers "
        "keeps the conversations "
        "of a row apart only in batches of one row. Type model.attention=sdpa, or "
        "data.source.packing=false."
    ]


def _packing_problems(model: Any, cfg: DictConfig) -> list[str]:
    """Return whether conversations that are packed into rows would see each other in this
    architecture.

    transformers keeps them apart by their positions, in a function that only newer code of a model
    calls, and only in
    layers of attention: convolutions and recurrent layers read across.
    """
    if not check.is_of_transformers(cfg) or not OmegaConf.select(cfg, "data.source.packing"):
        return []
    ids = torch.zeros(1, 4, dtype=torch.long, device="meta")
    with patch("transformers.masking_utils.find_packed_sequence_indices", side_effect=_Reached):
        try:
            model(ids, documents=ids)
        except _Reached:
            if not (mixing := model.other_layers):
                return []
            reason = f" (it has layers of {', '.join(mixing)}, which know no conversations)"
        except Exception as error:
            # an architecture that takes no positions, or cannot run without values
            reason = f" ({type(error).__name__})"
        else:
            reason = ""
    return [
        f"data.source.packing=true: transformers' {type(model.inner).__name__} does not keep the "
        "conversations of a "
        f"row apart{reason}. Type data.source.packing=false."
    ]
