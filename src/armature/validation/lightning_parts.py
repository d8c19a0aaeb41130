"""Callbacks, loggers and limits of Lightning's: those that cannot work here are refused by name
before a run starts.
"""

import importlib.util
import logging
from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from armature.config import unresolved
from armature.validation import signatures

log = logging.getLogger(__name__)

UPLOADS = ("WandbLogger", "MLFlowLogger")  # with log_model they upload what ModelCheckpoint saves
PACKAGES = {  # module that a logger of Lightning's, or a strategy, imports
    "DeepSpeed": "deepspeed",
    "WandbLogger": "wandb",
    "MLFlowLogger": "mlflow",
    "CometLogger": "comet_ml",
    "TensorBoardLogger": "tensorboard",
    "LitLogger": "litlogger",
}


def warn_of_unused_groups(cfg: DictConfig) -> None:
    if unused := signatures.unused(cfg.task):
        log.warning(
            "%s does not take the groups %s: they are not used.",
            cfg.task._target_,
            ", ".join(unused),
        )


def misplaced_problems(cfg: DictConfig) -> list[str]:
    """Return the keys of the task that a file, such as an experiment, sets in a group that the task
    does not take.
    """
    return [
        f"{group}.{key}: {cfg.task._target_} does not take the group {group}, and task.{key} is "
        f"its own. In the experiment, write {key} below task: instead of below {group}:."
        for group in signatures.unused(cfg.task)
        for taken in [signatures.signature_at(str((cfg[group] or {}).get("_target_"))).parameters]
        for key in cfg[group] or ()
        if key in cfg.task and key not in (*signatures.HYDRA_KEYS, *taken)
    ]


def unused_problems(cfg: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Return the typed keys of a group that neither the task takes nor a key refers to, and that
    the task has itself.
    """
    written, target, found = str(unresolved(cfg)), cfg.task._target_, []
    unread = [group for group in signatures.unused(cfg.task) if f"${{{group}" not in written]
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        group, dot, name = key.partition(".")
        if dot and group in unread:
            own = (f"task.{each}" for each in (key, name))
            has = [each for each in own if OmegaConf.select(cfg, each) is not None]
            takes = [f"+task.{name}"] * (name in signatures.signature_at(target).parameters)
            found += [
                f"{override}: this has no effect, since {target} does not use the group {group}. "
                f"Type {each}={value}."
                for each in (has + takes)[:1]
            ]
    return found


def package_problems(cfg: DictConfig) -> list[str]:
    """Return the loggers and the strategy whose package is missing, and loggers that would upload
    nothing. No class is imported.
    """
    strategy = ("strategy", str(OmegaConf.select(cfg, "strategy._target_")))
    missing = [
        f"{key}: {module} is not installed. Type pip install {module.replace('_', '-')}, or "
        f"another {key.partition('.')[0]}."
        for key, target in [*signatures.targets_in(cfg, "logger"), strategy]
        if (module := PACKAGES.get(target.rpartition(".")[2]))
        and importlib.util.find_spec(module) is None
    ]
    if any(
        target.rpartition(".")[2] == "ModelCheckpoint"
        for _, target in signatures.targets_in(cfg, "callbacks")
    ):
        return missing
    return missing + [
        f"{key}.log_model={value}: it uploads the files of Lightning's ModelCheckpoint, and none "
        "is among the callbacks, so nothing would be uploaded. Add "
        "+callbacks.files._target_=lightning.pytorch.callbacks.ModelCheckpoint, or type "
        "checkpoint.root=s3://… for the run's own checkpoints."
        for key, target in signatures.targets_in(cfg, "logger")
        if target.rpartition(".")[2] in UPLOADS
        and (value := OmegaConf.select(cfg, f"{key}.log_model"))
    ]
