"""Compare a folder with the model that another library builds of it, on the meta device: no
process, no memory.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from armature.errors import ConfigError
from armature.finetune import architecture, check, folder, others
from armature.models.decoder import names
from armature.models.decoder.model import Decoder
from armature.models.wrapped import Match
from armature.validation.composing import instantiate

log = logging.getLogger(__name__)
# families of transformers whose attention keeps the documents of a packed row apart
PACKABLE = {
    "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "exaone4", "gemma", "gemma2",
    "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox",
    "gptj", "granite", "granitemoe", "helium", "llama", "ministral", "mistral", "mixtral",
    "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
}  # fmt: skip


def problems(cfg: DictConfig) -> list[str]:
    """Return what is wrong with the folder of a run that begins: an unknown architecture, names and
    shapes of weights.

    A run that resumes reads its checkpoint: only the model is built.
    """
    packs = check.is_of_transformers(cfg) and OmegaConf.select(cfg, "data.source.packing")
    if packs and (found := _kernel_problems(cfg)):
        return found
    try:
        model = build(cfg.model)
    except ConfigError as error:
        return error.problems
    found = weight_problems(model) if check.resumed(cfg) is None else []
    if isinstance(model, Decoder):
        return found
    if check.resumed(cfg) is None:
        found = found or _frozen_problems(model, cfg)
    if not check.is_of_transformers(cfg):
        _warn_of_normalization(cfg)
    if (longest := positions(model)) is not None and model.context > longest:
        found.append(
            f"model.context={model.context}, but model.pretrained={model.pretrained} has positions "
            f"for {longest} "
            f"tokens: type data.context={longest} or less."
        )
    return found + (_packing_problems(model) if packs else [])


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
    names, shapes.
    """
    path = Path(str(model.pretrained))
    weights = folder.weights(path)
    if weights.problems:
        return [*weights.problems]
    match, ours, found = _match(model, weights.tensors), isinstance(model, Decoder), []
    kind = "the decoder" if ours else type(model.inner).__name__
    if match.missing:
        found.append(
            f"{path}: its files lack {folder.some(sorted(match.missing))}, which {kind} has. "
            "Download it again."
        )
    if match.surplus:
        remedy = f"{architecture.OTHERS}: type model=huggingface" if ours else "Download it again"
        found.append(f"{path}: {folder.some(match.surplus)}: {kind} has no such tensors. {remedy}.")
    shapes = dict(sorted(match.wrong.items()))
    heads = () if ours else [name for name in shapes if model.may_be_new(name)]
    if head := [name for name in heads if shapes[name][0][1:] == shapes[name][1][1:]]:
        there, here = (shape[0] for shape in shapes[head[0]])
        found.append(
            f"model.classes={here}, but the head of model.pretrained={path} ({head[0]}) tells "
            f"{there} classes apart. Type model.classes={there}, or model.new_head=true for a head "
            "that begins at random."
        )
    if wrong := [f"{n} is {shapes[n][0]}, not {shapes[n][1]}" for n in shapes if n not in head]:
        found.append(
            f"{path}: config.json and the weights disagree: {folder.some(wrong)}. Download it "
            "again."
        )
    return found


def _match(model: Any, saved: Mapping[str, folder.SavedTensor]) -> Match:
    """Return how a folder's tensors fit a model, without what may be new, left or read anew."""
    if not isinstance(model, Decoder):
        found = model.match(saved)
        return Match(
            [name for name in found.missing if not model.may_be_new(name)],
            [name for name in found.surplus if not model.may_be_left(name)],
            {name: both for name, both in found.wrong.items() if not model.begins_anew(name)},
        )
    own = {str(names.theirs(name)): tuple(p.shape) for name, p in model.named_parameters()}
    # one that is tied in the folder may be trained apart, and may be in the files as well
    is_tied = folder.config(Path(str(model.pretrained))).get("tie_word_embeddings")
    tied = {names.theirs(names.HEAD)} if is_tied else set()
    found = Match.of(own, saved)
    return Match(
        {*found.missing} - tied,
        [n for n in found.surplus if n not in tied and not names.UNUSED.fullmatch(n)],
        found.wrong,
    )


def _frozen_problems(model: Any, cfg: DictConfig) -> list[str]:
    """Say which parameters begin at random. Return a problem if adapters would leave them so."""
    missing = model.match(folder.weights(Path(model.pretrained)).tensors).missing
    new = [
        name
        for name, _ in model.inner.named_parameters(remove_duplicate=False)
        if name in missing or model.begins_anew(name)
    ]
    if not new:
        return []
    log.info("model.pretrained=%s: %s begin at random.", cfg.model.pretrained, folder.some(new))
    if (node := check.adapter_of(cfg)) is None:
        return []
    try:
        (adapter := instantiate(node)).add_to(model)
    except ConfigError:
        return []  # `plan_check.adapter_problems` says it
    frozen = [name for name in new if not model.get_parameter(f"inner.{name}").requires_grad]
    modules = sorted({name.rpartition(".")[0] for name in frozen})
    return [
        f"task.adapter.train={adapter.train}: {folder.some(frozen)} begin at random, and would "
        f"stay so. Type task.adapter.train=[{','.join([*adapter.train, *modules])}]."
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


def _packing_problems(model: Any) -> list[str]:
    """Return a problem if conversations that are packed into rows may see each other in this
    architecture: transformers keeps them apart by their positions in the families of PACKABLE.
    """
    kind = model.inner.config.get_text_config().model_type
    if kind in PACKABLE:
        return []
    return [
        f"data.source.packing=true: transformers' {type(model.inner).__name__} of "
        f"model_type={kind} is not known to keep the conversations of a "
        "row apart. Type data.source.packing=false."
    ]
