"""Write a run's decoder as a folder that transformers loads, and compare its logits with the
run's.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file
from torch import Tensor, nn

from armature import files
from armature.checkpoint import convert, huggingface, state, storage
from armature.data import labels
from armature.data.chat import template
from armature.errors import ConfigError
from armature.finetune import architecture, built, check, folder, nf4, others
from armature.finetune.lora import Lora, merge, merged, row_norms
from armature.loading import load_task
from armature.models.adapters import is_adapter
from armature.models.decoder.check import ffn_hidden_of
from armature.models.decoder.model import Decoder
from armature.models.decoder.names import HEAD, shapes, theirs
from armature.models.wrapped import module_name
from armature.parallel import initialization
from armature.validation import signatures

SHARD_BYTES = 5_000_000_000  # of one file, as transformers writes them
DTYPES = ("float32", "bfloat16", "float16")
PROBES = 64  # tokens whose logits are compared
NEAR = 1e-5  # of the largest logit: the same weights in another process's order of sums


def export(
    cfg: DictConfig,
    checkpoint: Path,
    target: Path,
    *,
    dtype: str | None = None,
    average: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> str:
    """Write the folder, of which nothing is left if its logits are not the run's.

    Return what was written, as a line.

    Weights are read and written file by file, unless the checkpoint leaves out a base model. The
    comparison holds the whole model, in fp32.

    Args:
        dtype: of the weights, as torch names it; None: that of the folder that the run started
            from, else float32.
        average: write the averaged weights of the EMA callback.
        shard_bytes: of the largest file.

    Raises:
        ConfigError: the model is no decoder that Hugging Face's architectures compute, or its
            logits differ.
    """
    kept = folder.kept_in(Path(cfg.run.dir))
    base = folder.config(kept) if kept is not None else None
    if dtype is None:
        dtype = str((base or {}).get("dtype") or (base or {}).get("torch_dtype") or "float32")
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: must be one of {', '.join(DTYPES)}.")
    form = form_of(cfg)
    config = form.config(dtype, base)
    with files.folder_beside(target) as beside:
        part = beside / target.name
        part.mkdir()
        files.replace(part / folder.CONFIG, json.dumps(config, indent=2) + "\n")
        write_tokenizer(kept, Path(cfg.run.dir), part)
        source = Source(
            checkpoint, form.rename, average=average, adapter=adapter_of(cfg), shapes=form.shapes
        )
        source.add_base(cfg)
        names = _write_weights(
            source, part, getattr(torch, dtype), shard_bytes, left_out=form.left_out
        )
        source.base = {}
        far = _difference(cfg, source, form, part, getattr(torch, dtype), average=average)
        if not far <= NEAR:
            raise ConfigError(
                f"{target}: its logits differ from the run's by {far:.1e} of the largest, so it "
                "was not written. "
                "Please report this with the run's config.yaml."
            )
        part.replace(target)
    count = len([*target.glob("*.safetensors")])
    return (
        f"{target}: {len(names)} tensors of {dtype} in {count} file{'s' * (count > 1)}; its "
        "logits are the run's"
    )


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a run's model is written as a folder.

    Attributes:
        context, vocab_size: of the tokens that both are compared on.
        rename: returns Hugging Face's name of a parameter, or None; `module_name` the name in
            transformers' model.
        shapes: of all parameters, by the model's names.
        left_out: Hugging Face's names of what is not written: tied parameters, but for one of their
            names.
        config: returns config.json, given the weights' type and the config.json that the run
            started from.
        read: returns the model of a folder, in fp32 on the CPU and in evaluation mode.
    """

    context: int
    vocab_size: int
    rename: Callable[[str], str | None]
    module_name: Callable[[str], str | None]
    shapes: Mapping[str, tuple[int, ...]]
    left_out: Collection[str]
    config: Callable[[str, Mapping[str, Any] | None], dict[str, Any]]
    read: Callable[[Path], nn.Module]


def form_of(cfg: DictConfig) -> Form:
    """Return how a run's model is written. Raises ConfigError for a model that has no such form."""
    if check.is_of_transformers(cfg):
        return _form_of_transformers(cfg)
    args = decoder_arguments(cfg)
    return Form(
        context=args["context"], vocab_size=args["vocab_size"], rename=theirs, module_name=theirs,
        left_out=[str(theirs(HEAD))] if args["tied"] else [], shapes=shapes(args),
        config=lambda dtype, base: architecture.config_of(args, dtype=dtype, base=base),
        read=partial(read_decoder, context=args["context"]),
    )  # fmt: skip


def _form_of_transformers(cfg: DictConfig) -> Form:
    model = built.build(cfg.model)
    head = _head_of(cfg, model) if cfg.model._target_ == others.CLASSIFIER else {}

    def config(dtype: str, base: Mapping[str, Any] | None) -> dict[str, Any]:
        kept = {
            k: v for k, v in (base or {}).items() if k not in ("dtype", "torch_dtype", "num_labels")
        }
        return kept | {"torch_dtype": dtype} | head

    def read(path: Path) -> nn.Module:
        own_head = {"new_head": False} if head else {}
        return read_meta(built.build(cfg.model, pretrained=str(path), **own_head))

    return Form(
        context=cfg.model.context,
        vocab_size=model.inner.config.get_text_config().vocab_size,
        rename=model.saved_name,
        module_name=module_name,
        config=config,
        read=read,
        left_out=[model.saved_name(name) for name in model.inner.all_tied_weights_keys],
        shapes={name: tuple(param.shape) for name, param in model.named_parameters()},
    )


def _head_of(cfg: DictConfig, model: Any) -> dict[str, Any]:
    """Return what config.json says of a classifier's head: the classes' names, and what a row is
    padded with.
    """
    known = (labels.read(Path(cfg.run.dir) / labels.CLASSES_FILE) or {}).get("classes", [])
    names = [*known, *(f"LABEL_{i}" for i in range(len(known), cfg.model.classes))]
    return {
        "architectures": [type(model.inner).__name__],
        "problem_type": "single_label_classification",
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        "pad_token_id": model.padding,
    }


def decoder_arguments(cfg: DictConfig) -> dict[str, Any]:
    """Return all arguments of a run's decoder. Raises ConfigError for another model."""
    if (target := cfg.model._target_) != check.DECODER:
        raise ConfigError(
            f"model._target_={target}: only {check.DECODER} and models of transformers "
            "have Hugging Face's "
            "form. Name a file (.safetensors, .ckpt, .onnx or .pt2) instead."
        )
    given: Any = OmegaConf.to_container(cfg.model, resolve=True)
    args = signatures.defaults_of(target) | {k: v for k, v in given.items() if k[0] != "_"}
    return args | {"ffn_hidden": args["ffn_hidden"] or ffn_hidden_of(args["width"])}


def adapter_of(cfg: DictConfig) -> Lora | None:
    node = check.adapter_of(cfg)
    return None if node is None else instantiate(node)


class Source:
    """The weights of a checkpoint, under Hugging Face's names. Adapters are added to their weights.

    Attributes:
        names: the checkpoint's names of weights by Hugging Face's; of a matrix of 4 bits that of
            its codes.
        lacking: the shapes of weights that the checkpoint leaves out, by Hugging Face's names.
        base: these weights, by the LightningModule's names.
        adapters: the checkpoint's names of A, B and, of DoRA, the change of norms, by Hugging
            Face's names of the weights that they adapt.
    """

    def __init__(
        self, checkpoint: Path, rename: Callable[[str], str | None], *, average: bool = False,
        adapter: Lora | None = None, shapes: Mapping[str, tuple[int, ...]],
    ) -> None:  # fmt: skip
        self.checkpoint, self.scale = checkpoint, 0.0 if adapter is None else adapter.scale
        self.base: Mapping[str, Tensor] = {}
        try:
            self.saved: dict[str, Any] = storage.read_metadata(checkpoint).state_dict_metadata
        except FileNotFoundError as error:
            raise ConfigError(str(error)) from None
        prefix = convert.AVERAGES if average else ""
        if average and not any(name.startswith(prefix) for name in self.saved):
            raise convert.lacks_average(checkpoint)
        own = [name for name in self.saved if name.startswith(convert.MODEL)]
        self.names: dict[str, str] = {}
        self.adapters: dict[str, list[str]] = {}
        for name in own:
            saved_as = prefix + name if prefix + name in self.saved else name
            if adapter is not None and is_adapter(name):
                base = str(rename(f"{name.removeprefix(convert.MODEL).rpartition('.')[0]}.weight"))
                self.adapters.setdefault(base, []).append(saved_as)
                self.adapters[base].sort()
                continue
            if (renamed := rename(nf4.weight_of(name.removeprefix(convert.MODEL)))) is None:
                raise ConfigError(
                    f"{checkpoint}: {name} has no name in Hugging Face's form. Name a file instead."
                )
            if nf4.weight_of(name) == name or name.endswith(".codes"):
                self.names[renamed] = saved_as
        renamed = {str(rename(name)): name for name in shapes}
        self._own = {name: own for name, own in renamed.items() if name not in self.names}
        self.lacking = {name: shapes[own] for name, own in self._own.items()}
        self._split_stacks(shapes, rename)

    def _split_stacks(
        self, shapes: Mapping[str, tuple[int, ...]], rename: Callable[[str], str | None]
    ) -> None:
        """Write each matrix of a stack as a tensor of its own, whose name has its number in place
        of {}.
        """
        self.stacks: dict[str, tuple[str, int]] = {}
        for own, shape in shapes.items():
            if "{}" not in (pattern := str(rename(own))):
                continue
            parts = {pattern.format(i): (pattern, i) for i in range(shape[0])}
            self.stacks |= parts
            if pattern in self.lacking:
                self.lacking |= dict.fromkeys(parts, self.lacking.pop(pattern)[1:])
            else:
                saved_as = self.names.pop(pattern)
                self.names |= dict.fromkeys(parts, saved_as)

    def add_base(self, cfg: DictConfig) -> None:
        """Read the weights that the checkpoint leaves out from the run's base model."""
        if self.lacking:
            self.base = load_task(cfg, self.checkpoint, averaged=False).state_dict()

    def elements(self, name: str) -> int:
        """Return the number of elements of a weight."""
        if name in self.lacking:
            return math.prod(self.lacking[name])
        saved_as = self.names[name]
        if name in self.stacks:
            return self.saved[saved_as].size[1:].numel()
        return self.saved[saved_as].size.numel() * (1 if nf4.weight_of(saved_as) == saved_as else 2)

    def read(self, names: list[str]) -> dict[str, Tensor]:
        weights = self._read_frozen(names)
        for name in weights.keys() & self.adapters.keys():
            a, b, *change = self.read_adapter(name)
            norms = row_norms(weights[name]) + change[0] if change else None
            weights[name] = merged(weights[name], a, b, scale=self.scale, norms=norms)
        return weights

    def _read_frozen(self, names: list[str]) -> dict[str, Tensor]:
        """Return weights without their adapters."""
        stacked = [name for name in names if name in self.stacks]
        if stacked:
            single = self._read_frozen([name for name in names if name not in self.stacks])
            whole = self._load([*{self.names[name] for name in stacked if name in self.names}])
            for name in stacked:
                pattern, index = self.stacks[name]
                stack = (
                    whole[self.names[name]]
                    if name in self.names
                    else self.base[convert.MODEL + self._own[pattern]]
                )
                single[name] = stack[index]
            return single
        parts = {name: nf4.parts_of(self.names[name]) for name in names if name in self.names}
        found = self._load([saved_as for of_weight in parts.values() for saved_as in of_weight])
        weights = {name: nf4.joined([found.pop(part) for part in parts[name]]) for name in parts}
        return weights | {
            name: self._read_base(convert.MODEL + self._own[name])
            for name in names
            if name in self._own
        }

    def read_norms(self, name: str) -> Tensor:
        """Return the norms of rows (out,) that DoRA learned for a weight."""
        return row_norms(self._read_frozen([name])[name]) + self.read_adapter(name)[2]

    def _read_base(self, own: str) -> Tensor:
        if own in self.base:
            return self.base[own]
        return nf4.joined(
            [self.base[part] for part in nf4.parts_of(f"{own.rpartition('.')[0]}.codes")]
        )

    def read_adapter(self, name: str) -> list[Tensor]:
        """Return A (rank, in), B (out, rank) and, of DoRA, the change of norms (out,) of the
        adapter of a weight.
        """
        found = self._load(self.adapters[name])
        return [found[part] for part in self.adapters[name]]

    def _load(self, saved_as: list[str]) -> dict[str, Tensor]:
        return state.load_tensors(self.checkpoint, saved_as, self.saved)


def write_tokenizer(kept: Path | None, run_dir: Path, target: Path) -> None:
    """Write the tokenizer and chat template of a run, which started from the folder of which `kept`
    is its copy.
    """
    if kept is not None:
        for name in folder.SMALL_FILES:
            if name != folder.CONFIG:
                folder.copy(kept / name, target / name)
    elif (run_dir / folder.TOKENIZER).is_file():
        shutil.copyfile(run_dir / folder.TOKENIZER, target / folder.TOKENIZER)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        files.replace(target / folder.TOKENIZER_CONFIG, json.dumps(settings, indent=2) + "\n")
    if (run_dir / folder.CHAT_TEMPLATE).is_file():
        _write_chat_template(kept, run_dir, target)


def _write_chat_template(kept: Path | None, run_dir: Path, target: Path) -> None:
    """Write the template that the run was trained with, and let generation stop where its turns
    end.
    """
    shutil.copyfile(run_dir / folder.CHAT_TEMPLATE, target / folder.CHAT_TEMPLATE)
    # the run's has it, or is another
    shutil.rmtree((target / folder.TOOL_TEMPLATE).parent, ignore_errors=True)
    file = target / folder.TOKENIZER_CONFIG
    settings = folder.special_tokens(run_dir) | (folder.read_json(file) if file.is_file() else {})
    settings.pop("chat_template", None)
    files.replace(file, json.dumps(settings, indent=2) + "\n")
    mark = template.load(run_dir, template=None).end_of_turn
    end = folder.token_ids(run_dir / folder.TOKENIZER).get(mark or "")
    # an adapter's folder has no config.json
    ends = folder.end_tokens(target if kept is None else kept)
    if end is not None and end not in ends:
        file = target / "generation_config.json"
        made = folder.read_json(file) if file.is_file() else {}
        files.replace(file, json.dumps(made | {"eos_token_id": [*ends, end]}, indent=2) + "\n")


def _write_weights(
    source: Source, target: Path, dtype: torch.dtype, shard_bytes: int, *, left_out: Collection[str]
) -> list[str]:
    """Write safetensors files of at most `shard_bytes`, and their index if there are several."""
    names = [name for name in (*source.names, *source.lacking) if name not in left_out]
    sizes = {name: source.elements(name) * dtype.itemsize for name in names}
    shards: list[list[str]] = [[]]
    for name in names:
        if shards[-1] and sum(sizes[each] for each in shards[-1]) + sizes[name] > shard_bytes:
            shards.append([])
        shards[-1].append(name)
    listed: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = (
            folder.WEIGHTS
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        tensors = {name: value.to(dtype).contiguous() for name, value in source.read(shard).items()}
        save_file(tensors, target / file, metadata={"format": "pt"})
        files.sync(target / file)
        listed |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": listed}
        files.replace(target / folder.INDEX, json.dumps(index, indent=2) + "\n")
    return names


@torch.no_grad()
def _difference(
    cfg: DictConfig, source: Source, form: Form, target: Path, dtype: torch.dtype, *, average: bool
) -> float:
    """Return how far the folder's logits are from those of the run's weights in `dtype`, as a share
    of the largest.
    """
    length = min(form.context, PROBES)
    ids = torch.randint(form.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    task = load_task(cfg, source.checkpoint, averaged=average)
    model: Any = merge(task.get_submodule("model").float())
    model.document_token = None  # it may be among the ids, and only this model would mask by it
    for param in model.parameters():
        param.copy_(param.to(dtype))
    expected = model(ids)
    del task, model
    found = form.read(target)(ids)
    return float((found - expected).abs().max() / expected.abs().max())


def read_decoder(
    path: Path,
    *,
    context: int,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Return the decoder of a Hugging Face folder, in evaluation mode, in one process."""
    config, name = folder.config(path), str(path)
    args = architecture.arguments(config, name=name)
    with torch.device("meta"):
        model = Decoder(**args, context=context, pretrained=name).to(dtype)
    return read_meta(model, device=device)


def read_meta(model: nn.Module, *, device: str | torch.device = "cpu") -> nn.Module:
    """Return a model that was on the meta device, with the weights of the folder that it names, in
    evaluation mode.
    """
    initialization.materialize(model, device=torch.device(device))
    huggingface.read(model, huggingface.imported_names(model), alone=True)
    return model.eval()
