"""Weights of Hugging Face folders, straight into a model under any layout.

A model that can be read so has `pretrained`, the folder or None, and `pretrained_name`, which returns Hugging Face's
name of one of its parameters, or None for one that they do not have.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Container, Iterable
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from typing_extensions import override

from armature.checkpoint import storage
from armature.errors import ConfigError
from armature.finetune import folder as folders

_TIED = {"lm_head.weight": "model.embed_tokens.weight"}  # of a folder whose head is its embedding


def imported_names(model: nn.Module) -> set[str]:
    """Return the parameters that `read` fills, by the model's own names; none if it does not start from a folder."""
    if not isinstance(getattr(model, "pretrained", None), str) or not hasattr(model, "pretrained_name"):
        return set()
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, _ in named if model.pretrained_name(name) is not None}  # pyright: ignore[reportCallIssue]


def read_others(module: nn.Module, held: Container[str]) -> set[str]:
    """Fill the parameters that come from folders and are not `held`, in one process. Return their names."""
    found: set[str] = set()
    for prefix, model in module.named_modules():
        names = {name for name in imported_names(model) if f"{prefix}.{name}" not in held}
        if names:
            read(model, names)
            found |= {f"{prefix}.{name}" for name in names}
    return found


def tensors(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Return whole tensors of a folder by Hugging Face's names, in its types. A head that is tied is its embedding."""
    saved, found = folders.weights(folder).tensors, dict[str, Tensor]()
    for name in names:
        own = name if name in saved else _TIED.get(name, name)
        if own not in saved:
            raise ConfigError(f"{folder}: it has no {own}.")
        with safe_open(folder / saved[own].file, framework="pt") as file:
            found[name] = file.get_tensor(own)
    return found


def read(model: nn.Module, names: Iterable[str]) -> None:
    """Fill these parameters from the model's folder. Called by all ranks; each reads the part that it holds.

    Values are converted to the parameters' types while they are copied out of the mapped files. A head that is not tied
    takes the embedding's values if the folder's is. Raises ConfigError, or OSError if a file cannot be read.
    """
    folder, held, wanted = folders.find(str(model.pretrained)), dict(model.named_parameters()), set(names)
    targets = {model.pretrained_name(name): held[name].detach() for name in held if name in wanted}  # pyright: ignore[reportCallIssue]
    found = folders.weights(folder)
    if found.problems:
        raise ConfigError([*found.problems])
    own = {name: value for name, value in targets.items() if name in found.tensors or name not in _TIED}
    _load(folder, found.files, own)
    _load(folder, found.files, {_TIED[name]: value for name, value in targets.items() if name not in own})


def _load(folder: Path, files_of_index: list[str], tensors: dict[str, Tensor]) -> None:
    try:
        with storage.expect_single_process():
            reader = _Reader(folder, files_of_index)
            dcp.load(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise storage.failure(error) from error


class _Reader(HuggingFaceStorageReader):
    """torch's reader, of the files that the folder's index names: Mistral's consolidated ones lie beside them."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        super().__init__(str(folder))
        self._wanted = {str(folder / name) for name in names}

    @override
    def read_metadata(self) -> Metadata:
        listed = self.fs.ls
        try:
            self.fs.ls = lambda path: [file for file in listed(path) if file in self._wanted]
            return super().read_metadata()
        finally:
            self.fs.ls = listed
