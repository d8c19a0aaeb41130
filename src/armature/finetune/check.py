"""Fill a run's configuration from the folder of `model.pretrained`, and refuse what does not fit.

Torch-free.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from armature.checkpoint import resume
from armature.errors import ConfigError
from armature.finetune import architecture, base, folder, others
from armature.validation import signatures

log = logging.getLogger(__name__)
DECODER = "armature.models.decoder.model.Decoder"
LORA = "armature.finetune.lora.Lora"
KEY = "model.pretrained"
READ = {
    DECODER: architecture.arguments,
    **dict.fromkeys(others.TARGETS, others.arguments),
    others.IMAGES: others.image_arguments,
}


def fill(cfg: DictConfig) -> DictConfig:
    """Return the configuration with the sizes of `model.pretrained`; as it is, if the model names
    no folder.

    Raises ConfigError with everything that is wrong with the folder, and every typed size that is
    not the folder's. A run that resumes has a copy of the folder's small files, and its checkpoint
    holds the weights, unless it holds
    adapters: then the folder must be the checkpoint's base model.
    """
    if (name := named_by(cfg)) is None:
        return cfg
    cfg = cfg.copy()
    checkpoint, run_dir = _checkpoint(cfg), resumed(cfg)
    if checkpoint is not None and (needed := base.recorded(checkpoint)) is not None:
        base.found(name, needed, checkpoint)
    path = (
        Path(cfg.model.pretrained)
        if run_dir is not None and relocate(cfg, run_dir)
        else locate(cfg)
    )
    config, target = folder.config(path), cfg.model._target_
    if config.get("quantization_config"):
        raise ConfigError(
            f"{KEY}={name}: config.json: quantization_config: its weights are quantized. Name the "
            "folder of the original weights."
        )
    args = READ[target](config, name=name)
    problems = _set_sizes(cfg, args, config)
    problems += _tokenizer_problems(cfg, path, args.get("vocab_size"))
    try:
        folder.end_tokens(path)
    except ConfigError as error:
        problems += error.problems
    if run_dir is None:
        problems += folder.weights(path).problems
    if problems:
        raise ConfigError(problems)
    return cfg


def left_out(cfg: DictConfig, checkpoint: Path | None) -> dict[str, str] | None:
    """Return what this run's checkpoints say of the base model that they leave out; None: they hold
    all weights.

    A run with adapters leaves out what it has read from model.pretrained at this start. Raises
    ConfigError if the checkpoint to resume from leaves out another model: the folder may have
    changed since the checks before launch.
    """
    needed, name = base.recorded(checkpoint), named_by(cfg)
    leaves_out = adapter_of(cfg) is not None and not cfg.checkpoint.include_base
    if checkpoint is not None and needed is None:
        if leaves_out:
            log.info(
                "Checkpoints hold the frozen weights too, since they come from %s.", checkpoint
            )
        return None
    if name is None or (needed is None and not leaves_out):
        return None
    path = (
        folder.find(name)
        if needed is None or checkpoint is None
        else base.found(name, needed, checkpoint)
    )
    return base.record(path) if leaves_out else None


def adapter_of(cfg: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the node of task.adapter if it makes our adapters; a task of a user's may mean
    something else by it.
    """
    node = (cfg.get("task") or {}).get("adapter")
    is_ours = isinstance(node, Mapping) and signatures.derives_from(str(node.get("_target_")), LORA)
    return node if is_ours else None


def named_by(cfg: DictConfig) -> str | None:
    """Return the folder that a model's configuration names, or None."""
    ours = OmegaConf.select(cfg, "model._target_") in READ
    return OmegaConf.select(cfg, KEY) if ours else None


def is_of_transformers(cfg: DictConfig) -> bool:
    """Return whether transformers builds and computes the model."""
    return OmegaConf.select(cfg, "model._target_") in others.TARGETS


def is_of_others(cfg: DictConfig) -> bool:
    """Return whether another library, transformers or timm, builds and computes the model."""
    return is_of_transformers(cfg) or OmegaConf.select(cfg, "model._target_") == others.IMAGES


def require_transformers(cfg: DictConfig) -> None:
    """Raise ConfigError if the model is one of transformers' and that is not installed."""
    if is_of_transformers(cfg):
        others.require_transformers(f"{KEY}={cfg.model.pretrained}")


def _run_dir(cfg: DictConfig) -> Path | None:
    named = cfg.run.name is not None and cfg.resume != "never"
    return Path(str(cfg.run.root)) / str(cfg.run.name) if named else None


def _checkpoint(cfg: DictConfig) -> Path | None:
    """Return the checkpoint that this start probably resumes from.

    What is wrong with it is found later.
    """
    run_dir = _run_dir(cfg)
    try:
        own = None if run_dir is None else resume.last_checkpoint(run_dir, cfg)
        if own is not None or cfg.resume in resume.MODES:
            return own
        return resume.last_checkpoint(resume.to_path(cfg.resume))
    except (OSError, ValueError, ConfigError):
        return None


def resumed(cfg: DictConfig) -> Path | None:
    """Return the run directory if this start resumes from a checkpoint in it that holds all
    weights, or None.
    """
    run_dir, checkpoint = _run_dir(cfg), _checkpoint(cfg)
    if run_dir is None or checkpoint is None or folder.kept_in(run_dir) is None:
        return None
    own = checkpoint.parent == resume.folder(run_dir, cfg)
    return run_dir if own and base.recorded(checkpoint) is None else None


def locate(cfg: DictConfig) -> Path:
    """Return the folder that a configuration names, which then names the copy if it was downloaded,
    and no `~`.

    Raises ConfigError for what is no model.
    """
    name = str(cfg.model.pretrained)
    path = folder.find(name)
    if path != Path(
        name
    ):  # all ranks and later starts read this very copy, and a library knows no ~
        _replace(cfg.data, name, str(path))
        cfg.model.pretrained = str(path)
    return path


def relocate(cfg: DictConfig, run_dir: Path) -> bool:
    """Let a configuration name the run's own copy of a folder that is gone, in place.

    Return whether it was.
    """
    name, kept = named_by(cfg), folder.kept_in(run_dir)
    if name is None or kept is None or Path(name).expanduser().is_dir():
        return False
    log.info(
        "%s=%s is not there any more: the run's own copy of its settings and tokenizer is used.",
        KEY,
        name,
    )
    _replace(cfg.data, name, str(kept))
    cfg.model.pretrained = str(kept)
    return True


def _replace(node: Any, old: str, new: str) -> None:
    """Replace a path, also where it begins a longer one, in all texts of a configuration."""
    for key in list(node) if isinstance(node, DictConfig) else range(len(node)):
        value = node[key]
        if isinstance(value, DictConfig | ListConfig):
            _replace(value, old, new)
        elif isinstance(value, str) and (value == old or value.startswith(f"{old}/")):
            node[key] = new + value.removeprefix(old)


def _set_sizes(cfg: DictConfig, args: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    name, found = cfg.model.pretrained, []
    longest, context = architecture.longest_context(config), OmegaConf.select(cfg, "model.context")
    if isinstance(context, int) and longest is not None and context > longest:
        found.append(
            f"model.context={context}, but {KEY}={name} is made for at most {longest} positions: "
            "type "
            f"data.context={longest} or less."
        )
    with open_dict(cfg.model):
        for key, value in args.items():
            given = cfg.model.get(key)
            given = OmegaConf.to_container(given) if OmegaConf.is_config(given) else given
            if given is None or key not in cfg.model:
                cfg.model[key] = value
            elif not _same(key, given, value, args):
                found.append(
                    f"model.{key}={given}, but {KEY}={name} has {value}. Leave model.{key} out: "
                    "model=pretrained takes "
                    "all sizes from the folder."
                )
    return found


def _same(key: str, given: Any, value: Any, args: Mapping[str, Any]) -> bool:
    """Return whether a typed size is the folder's.

    Tied matrices may be trained apart, as a pipeline needs.
    """
    if key == "tied":
        return given == value or value
    if key == "head_dim":
        value = value or args["width"] // args["heads"]
    if key == "kv_heads":
        value = value or args["heads"]
    if key == "rope_scaling" and isinstance(given, Mapping):
        given = {"kind": "llama3", **given}
    return bool(given == value)


def number_classes(cfg: DictConfig, data: Any) -> list[str]:
    """Let the data number their classes as the head does that training begins with.

    Return a problem if that is not possible.
    """
    from armature.data.labels import LabeledData, numbered_as

    target = OmegaConf.select(cfg, "model._target_")
    begins_anew = cfg.model.get("new_head", target == others.IMAGES)
    if target not in (others.CLASSIFIER, others.IMAGES) or begins_anew:
        return []
    name, classes = cfg.model.pretrained, data.class_names
    head = others.class_names(folder.config(Path(name)))
    if head is None or classes is None:
        return []
    numbered = numbered_as(head, classes)
    if numbered is not None and isinstance(data, LabeledData):
        data.begin_with(numbered)
        return []
    if numbered is not None and numbered[: len(classes)] == classes:
        return []
    return [
        f"model.new_head=false: the head of {KEY}={name} numbers the classes "
        f"{folder.some(head, 5)} (id2label in "
        f"config.json), and the data {folder.some(classes, 5)}. Rename the labels of the data (its "
        "names, or its numbers from 0 on), or "
        "type "
        "model.new_head=true for a head that begins at random."
    ]


def _tokenizer_problems(cfg: DictConfig, path: Path, vocab_size: int | None) -> list[str]:
    own, found = path / folder.TOKENIZER, []
    if not own.is_file() or vocab_size is None:
        return found
    known = folder.token_ids(own)
    if (last := max(known.values(), default=-1)) >= vocab_size:
        found.append(
            f"{own}: its largest token is {last}, but the model has {vocab_size} rows for tokens. "
            "Tokenizer and model do not belong together: download the folder again, or, for tokens "
            "of your own, save it after model.resize_token_embeddings(len(tokenizer))."
        )
    if problem := folder.tokens_problem(own, known):
        found.append(problem)
    key, source = "data.source.tokenizer", OmegaConf.select(cfg, "data.source")
    if "tokenizer" in cfg.data:
        key, source = "data.tokenizer", cfg.data
    if not isinstance(source, DictConfig) or "tokenizer" not in source:
        return found
    chosen = source.tokenizer
    whole = (
        "template" in source or source is cfg.data
    )  # conversations and labeled texts name the folder
    remedy = f"Type {key}={path if whole else own}."
    if chosen is None:
        found.append(f"{key}=null: {KEY}={path} was trained with a tokenizer of its own. {remedy}")
        return found
    named = Path(chosen).expanduser()
    file = named / folder.TOKENIZER if named.is_dir() else named
    if file.is_file() and folder.vocabularies_differ(own, file):
        found.append(f"{key}={chosen} gives other ids than {KEY} was trained with. {remedy}")
    return found
