"""Add an adapter in peft's form to the model that it was trained on: a folder without adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from armature import files
from armature.errors import ConfigError
from armature.finetune import architecture, check, folder, inference, peft
from armature.finetune.export import NEAR, PROBES, read_decoder
from armature.models.decoder.names import theirs


def merge(adapter: Path, target: Path, *, base: str | None = None) -> str:
    """Write the base model with the adapter added, file by file in the base's types.

    Return a line about it.

    Where the decoder computes the architecture, the logits of the result are compared with those of
    base and adapter.

    Args:
        base: the folder of the base model; None: the one that adapter_config.json names.

    Raises:
        ConfigError: the adapter is no LoRA or DoRA, does not belong to the base, or the logits
            differ.
    """
    whole, own = inference.base_of(adapter, base), peft.settings(adapter)
    weights = folder.weights(whole)
    kinds = {name: tensor.dtype for name, tensor in weights.tensors.items()}
    if problems := [*weights.problems, *check.type_problems(whole, kinds)]:
        raise ConfigError(problems)
    adapters = peft.read(adapter, own, weights.tensors)
    with files.folder_beside(target) as beside:
        part = beside / target.name
        part.mkdir()
        _copy_small_files(adapter, whole, part)
        types: dict[str, torch.dtype] = {}
        for name in weights.files:
            tensors = load_file(whole / name)
            changed = {
                key: peft.added(tensors[key], adapters[key], own)
                for key in tensors.keys() & adapters.keys()
            }
            tensors |= {key: value.to(tensors[key].dtype) for key, value in changed.items()}
            save_file(tensors, part / name, metadata={"format": "pt"})
            files.sync(part / name)
            types |= {key: tensors[key].dtype for key in changed}
        is_ours = _is_decoder(whole)
        if is_ours and not (far := _difference(adapter, whole, part, types)) <= NEAR:
            raise ConfigError(
                f"{target}: its logits differ from those of {whole} with {adapter} by {far:.1e} of "
                "the largest, so it "
                "was not written. Please report this with both config.json."
            )
        part.replace(target)
    said = (
        "its logits are those of both"
        if is_ours
        else "its logits were not compared: the decoder does not compute it"
    )
    return f"{target}: {whole} with {len(adapters)} adapters of rank {own.rank} added; {said}"


def _is_decoder(whole: Path) -> bool:
    config = folder.config(whole)
    if config.get("model_type") not in architecture.FAMILIES:
        return False
    try:
        architecture.arguments(config, name=str(whole))
    except ConfigError:
        return False
    return True


def _copy_small_files(adapter: Path, whole: Path, part: Path) -> None:
    """Copy what a model's folder has besides its weights.

    The adapter's tokenizer and chat template come first.
    """
    for name in (*folder.SMALL_FILES, folder.INDEX):
        places = (whole,) if name in (folder.CONFIG, folder.INDEX) else (adapter, whole)
        if (
            name in (folder.CHAT_TEMPLATE, folder.TOOL_TEMPLATE)
            and folder.chat_template(adapter) is not None
        ):
            places = (adapter,)  # which may have it in its tokenizer_config.json
        found = next((each for each in places if (each / name).is_file()), None)
        if found is not None:
            folder.copy(found / name, part / name)


@torch.no_grad()
def _difference(adapter: Path, whole: Path, target: Path, types: dict[str, torch.dtype]) -> float:
    """Return how far the logits of a folder are from those of base and adapter, as a share of the
    largest.
    """
    model: Any = read_decoder(whole, context=PROBES)
    vocab_size = folder.config(whole)["vocab_size"]
    ids = torch.randint(vocab_size, (1, PROBES), generator=torch.Generator().manual_seed(0))
    peft.add_to(model, adapter)
    for name, param in model.named_parameters():
        if (dtype := types.get(str(theirs(name)))) is not None:
            param.copy_(param.to(dtype))
    expected = model(ids)
    del model
    found = read_decoder(target, context=PROBES)(ids)
    return float((found - expected).abs().max() / expected.abs().max())
