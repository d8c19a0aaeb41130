"""Write a run's decoder as a folder that transformers loads, and compare its logits with the
run's.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from omegaconf import DictConfig, OmegaConf
from torch import nn

from armature import files
from armature.checkpoint import convert, huggingface
from armature.data import labels
from armature.data.chat import template
from armature.errors import ConfigError
from armature.finetune import architecture, built, check, folder, others
from armature.finetune.lora import Lora, merge
from armature.loading import load_task
from armature.models.decoder.check import ffn_hidden_of
from armature.models.decoder.model import Decoder
from armature.models.decoder.names import HEAD, theirs
from armature.parallel import initialization
from armature.validation import signatures
from armature.validation.composing import instantiate

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

    Two copies of the model are in memory one after the other, in fp32.

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
    if average and not convert.has_averages(checkpoint):
        raise convert.lacks_average(checkpoint)
    of_transformers = check.is_of_transformers(cfg)
    config = (
        {}
        if of_transformers
        else architecture.config_of(decoder_arguments(cfg), dtype=dtype, base=base)
    )
    task = load_task(cfg, checkpoint, averaged=average)
    model: Any = merge(task.get_submodule("model").float())
    del task
    if of_transformers:
        config = _config_of_transformers(cfg, model, dtype, base)
        vocab_size = model.inner.config.get_text_config().vocab_size
    else:
        vocab_size = config["vocab_size"]
        model.document_token = None  # may be among the ids, and only this model would mask by it
    with torch.no_grad(), files.replacing(target) as part:
        part.mkdir()
        for param in model.parameters():
            param.copy_(param.to(getattr(torch, dtype)))
        length, seed = min(model.context, PROBES), torch.Generator().manual_seed(0)
        ids = torch.randint(vocab_size, (1, length), generator=seed)
        expected = model(ids)
        tied = bool(config.get("tie_word_embeddings"))
        _write_weights(model.to(getattr(torch, dtype)), part, shard_bytes, tied=tied)
        del model
        files.replace(part / folder.CONFIG, json.dumps(config, indent=2) + "\n")
        write_tokenizer(kept, Path(cfg.run.dir), part)
        far = float((_read_back(cfg, part)(ids) - expected).abs().max() / expected.abs().max())
        if not far <= NEAR:
            raise ConfigError(
                f"{target}: its logits differ from the run's by {far:.1e} of the largest, so it "
                "was not written. Please report this with the run's config.yaml."
            )
    weights = folder.weights(target)
    count = len(weights.files)
    return (
        f"{target}: {len(weights.tensors)} tensors of {dtype} in {count} file{'s' * (count > 1)}; "
        "its logits are the run's"
    )


def _config_of_transformers(
    cfg: DictConfig, model: Any, dtype: str, base: Mapping[str, Any] | None
) -> dict[str, Any]:
    kept = {
        k: v for k, v in (base or {}).items() if k not in ("dtype", "torch_dtype", "num_labels")
    }
    head = _head_of(cfg, model) if cfg.model._target_ == others.CLASSIFIER else {}
    return kept | {"torch_dtype": dtype} | head


def _write_weights(model: Any, part: Path, shard_bytes: int, *, tied: bool) -> None:
    """Write safetensors files of at most `shard_bytes`, and their index if there are several."""
    if isinstance(model, Decoder):
        named = {str(theirs(name)): param.detach() for name, param in model.named_parameters()}
        if tied:
            named.pop(str(theirs(HEAD)), None)
        save_torch_state_dict(named, part, max_shard_size=shard_bytes)
    else:
        model.inner.tie_weights()  # reading a checkpoint may part them
        model.inner.save_pretrained(part, max_shard_size=shard_bytes)
    for file in part.glob("*.safetensors"):
        files.sync(file)


def _read_back(cfg: DictConfig, path: Path) -> nn.Module:
    if not check.is_of_transformers(cfg):
        return read_decoder(path, context=cfg.model.context)
    own_head = {"new_head": False} if cfg.model._target_ == others.CLASSIFIER else {}
    return read_meta(built.build(cfg.model, pretrained=str(path), **own_head))


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
            "have Hugging Face's form. Name a file (.safetensors, .ckpt) instead."
        )
    given: Any = OmegaConf.to_container(cfg.model, resolve=True)
    args = signatures.defaults_of(target) | {k: v for k, v in given.items() if k[0] != "_"}
    return args | {"ffn_hidden": args["ffn_hidden"] or ffn_hidden_of(args["width"])}


def adapter_of(cfg: DictConfig) -> Lora | None:
    node = check.adapter_of(cfg)
    return None if node is None else instantiate(node)


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


def read_decoder(path: Path, *, context: int) -> nn.Module:
    """Return the decoder of a Hugging Face folder, in evaluation mode, in one process."""
    config, name = folder.config(path), str(path)
    args = architecture.arguments(config, name=name)
    with torch.device("meta"):
        model = Decoder(**args, context=context, pretrained=name)
    return read_meta(model)


def read_meta(model: nn.Module) -> nn.Module:
    """Return a model that was on the meta device, with the weights of the folder that it names, in
    evaluation mode.
    """
    initialization.materialize(model, device=torch.device("cpu"))
    huggingface.read(model, huggingface.imported_names(model), alone=True)
    return model.eval()
