"""The loggers that a configuration names: built, opened, and kept from ending the run."""

import logging
from pathlib import Path

import lightning.pytorch as L
from hydra.utils import get_object, instantiate
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from omegaconf import DictConfig

from armature.checkpoint import directory
from armature.errors import ConfigError
from armature.loggers import forgive_failures, mask_secrets, open_problems
from armature.parallel import process_group

log = logging.getLogger(__name__)


def build(cfg: DictConfig, checkpoint: Path | None) -> list[Logger]:
    """Build the configured loggers.

    TensorBoard drops what a killed process logged after the checkpoint.
    """
    step = directory.saved_step(checkpoint) if checkpoint is not None else None
    built = []
    for node in (cfg.logger or {}).values():
        target = get_object(node._target_)
        purges = (
            isinstance(target, type)
            and issubclass(target, TensorBoardLogger)
            and "purge_step" not in node
        )
        built.append(
            instantiate(node, **({"purge_step": step + 1} if purges and step is not None else {}))
        )
    forgive_failures(built)
    mask_secrets(built)
    return built


def open_services(trainer: L.Trainer, *, resumes: bool) -> None:
    """Open the services of the loggers.

    One that fails ends a first start; a resume continues without it.
    """
    found = process_group.on_rank_0(lambda: open_problems(trainer.loggers))
    if found and not resumes:
        remedy = (
            "Correct its group in the configuration or start its service, or type "
            "logger=tensorboard."
        )
        raise ConfigError([f"logger: {problem} {remedy}" for problem in found.values()])
    for problem in found.values() if process_group.rank() == 0 else ():
        log.error("%s The run resumes without it; metrics.csv has the same numbers.", problem)
    # a module that uses self.logger.experiment still finds one
    trainer.loggers = [
        DummyLogger() if i in found else logger for i, logger in enumerate(trainer.loggers)
    ]
