"""Weights of Hugging Face folders, straight into a model under any layout.

A model that can be read so has `pretrained`, the folder or None, and `pretrained_name`, which
returns Hugging Face's name of one of its parameters, or None for one that they do not have. A model
of another library (`models/wrapped.py`) has `names_in` instead, which returns what it takes from
the folder, and `whole_state`, which reads it on rank 0.
"""

# pyright: reportPrivateImportUsage=false

from collections.abc import Container, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from typing_extensions import override

from armature.checkpoint import storage
from armature.errors import ConfigError
from armature.finetune import folder as folders
from armature.finetune import nf4
from armature.parallel import initialization, process_group

# elements of the unsharded matrices that are in memory in fp32 while they are read
QUANTIZED_AT_ONCE = 64_000_000


def imported_names(model: nn.Module) -> set[str]:
    """Return the parameters that `read` fills, by the model's own names; none if it does not start
    from a folder.
    """
    if not isinstance(getattr(model, "pretrained", None), str):
        return set()
    if hasattr(model, "names_in"):
        try:
            return model.names_in(_weights(folders.find(str(model.pretrained))).tensors)  # pyright: ignore[reportCallIssue]
        except ValueError as error:
            raise ConfigError(f"{error}.") from error
    if not hasattr(model, "pretrained_name"):
        return set()
    named = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name for name in named if model.pretrained_name(nf4.weight_of(name)) is not None}  # pyright: ignore[reportCallIssue]


def read_others(module: nn.Module, held: Container[str]) -> set[str]:
    """Fill the parameters that come from folders and are not `held`, in one process.

    Return their names.
    """
    found: set[str] = set()
    for prefix, model in module.named_modules():
        names = {name for name in imported_names(model) if f"{prefix}.{name}" not in held}
        if names:
            read(model, names, alone=True)
            found |= {f"{prefix}.{name}" for name in names}
    return with_tied(module, found)


def with_tied(module: nn.Module, names: set[str]) -> set[str]:
    """Return names of parameters, and the other names of those that are tied."""
    params = dict(module.named_parameters(remove_duplicate=False))
    filled = {params[name] for name in names if name in params}
    return names | {name for name, param in params.items() if param in filled}


def read(model: nn.Module, names: Iterable[str], *, alone: bool = False) -> None:
    """Fill these parameters from the model's folder.

    Called by all ranks; each reads the part that it holds.

    With `alone` this process reads for itself, whether or not it is a rank of several.

    Values are converted to the parameters' types while they are copied out of the mapped files. A
    matrix of 4 bits is quantized from this rank's part of it in fp32, a few at a time. A head that
    is not tied takes the embedding's values if the folder's is. Raises ConfigError, or OSError if a
    file cannot be read.
    """
    folder, wanted = folders.find(str(model.pretrained)), {*names}
    found = _weights(folder)
    load = partial(_load, _Reader(folder, found.files), alone=alone)
    held: dict[str, Tensor] = {name: param.detach() for name, param in model.named_parameters()}
    if hasattr(model, "names_in"):
        held |= dict(model.named_buffers())
        _send(model, {name: held[name] for name in held if name in wanted}, alone=alone)
        return
    whole: dict[str, Tensor] = {}
    for name in [name for name in held if name in wanted]:
        theirs = model.pretrained_name(name)  # pyright: ignore[reportCallIssue]
        if theirs is not None:  # None: a part of a quantized matrix
            whole[theirs] = held[name]
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    load(
        {name: value for name, value in whole.items() if name in found.tensors or name not in tied}
    )
    load(
        {tied[name]: value for name, value in whole.items() if name in tied.keys() - found.tensors}
    )
    quantized = {f"{name}.codes": linear for name, linear in nf4.in_4_bits(model).items()}
    for few in _few_at_once({name: linear for name, linear in quantized.items() if name in wanted}):
        named = {model.pretrained_name(nf4.weight_of(name)): linear for name, linear in few.items()}  # pyright: ignore[reportCallIssue]
        weights = {name: linear.empty_weight() for name, linear in named.items()}
        load(weights)
        for name, linear in named.items():
            linear.fill(weights.pop(name))


def _few_at_once(linears: dict[str, nf4.Nf4Linear]) -> Iterator[dict[str, nf4.Nf4Linear]]:
    """Yield groups of matrices of at most QUANTIZED_AT_ONCE elements, or one matrix; the same on
    all ranks.
    """
    few, elements = dict[str, nf4.Nf4Linear](), 0
    for name, linear in linears.items():
        size = linear.in_features * linear.out_features
        if few and elements + size > QUANTIZED_AT_ONCE:
            yield few
            few, elements = {}, 0
        few[name], elements = linear, elements + size
    if few:
        yield few


def _weights(folder: Path) -> folders.Weights:
    found = folders.weights(folder)
    if found.problems:
        raise ConfigError([*found.problems])
    return found


@torch.no_grad()
def _send(model: nn.Module, held: dict[str, Tensor], *, alone: bool) -> None:
    """Let rank 0 read the whole folder in its own type, and send one tensor after another.

    Each rank keeps its part.
    """
    several = not alone and dist.is_initialized()
    reads = not several or dist.get_rank() == 0
    try:
        whole = model.whole_state() if reads else {}  # pyright: ignore[reportCallIssue]
    except ValueError as error:
        raise ConfigError(f"{error}.") from error
    for name, target in held.items():
        value = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        if reads:
            value.copy_(whole.pop(name.removeprefix("inner.")))
        if several:
            dist.broadcast(value, 0)
        initialization.place(value, target)


def _load(reader: "_Reader", tensors: dict[str, Tensor], *, alone: bool) -> None:
    with storage.expect_single_process(), storage.one_line_errors():
        dcp.load(
            dict(tensors),
            storage_reader=reader,
            process_group=process_group.cpu_group(),
            no_dist=alone or not dist.is_initialized(),
        )


class _Reader(HuggingFaceStorageReader):
    """torch's reader, of the files that the folder's index names.

    Mistral's consolidated ones lie beside them.
    """

    def __init__(self, folder: Path, names: list[str]) -> None:
        super().__init__(str(folder))
        self._wanted = {str(folder / name) for name in names}
        self._metadata: Metadata | None = None

    @override
    def read_metadata(self) -> Metadata:
        # of all files' headers: once, however many parts are read one after another
        if self._metadata is None:
            listed = self.fs.ls
            try:
                self.fs.ls = lambda path: [file for file in listed(path) if file in self._wanted]
                self._metadata = super().read_metadata()
            finally:
                self.fs.ls = listed
        return self._metadata
