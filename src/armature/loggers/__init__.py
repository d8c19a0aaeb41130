"""The loggers that a configuration names: built, opened, and kept from ending the run."""

import functools
import logging
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from omegaconf import DictConfig
from typing_extensions import override

from armature.errors import ConfigError, error_line, masked
from armature.validation import values
from armature.validation.composing import instantiate

MOST_FAILURES = 3  # in a row: a service that is away may take minutes for each
# by a Trainer, StepLog
CALLED = (
    "log_metrics",
    "log_hyperparams",
    "log_graph",
    "save",
    "after_save_checkpoint",
    "finalize",
)
log = logging.getLogger(__name__)


class NoLogger(DummyLogger):
    """Write nothing, and name the run's folder: for modules that are measured or predict."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self._run_dir = str(run_dir)

    @property
    @override
    def save_dir(self) -> str:
        return self._run_dir

    log_dir = root_dir = save_dir  # pyright: ignore[reportIncompatibleMethodOverride] (None in the base class)


class Guarded:
    """A logger whose failures do not end the run, and which gets no secret.

    A failure is reported once. After MOST_FAILURES in a row the logger is not called any more.
    """

    _in_a_row = 0
    _reported = False

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        plain = vars(params) if isinstance(params, Namespace) else params
        self._call("log_hyperparams", values.without_secrets(plain), *args, **kwargs)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> None:
        before = self._in_a_row
        if before >= MOST_FAILURES or (method := getattr(super(), name, None)) is None:
            return
        try:
            method(*args, **kwargs)
        except Exception as error:  # each service has errors of its own
            self._in_a_row += 1
            if not self._reported:
                self._reported = True
                log.error(
                    "%s failed in %s (%s). The run continues; config.yaml and metrics.csv have "
                    "the same. After %d failures in a row it is not used again in this start.",
                    type(self).__name__, name, masked(error_line(error)), MOST_FAILURES,
                )  # fmt: skip
            return
        # log_metrics may call `save`, whose failure counts
        if name == "log_metrics" and self._in_a_row == before:
            self._in_a_row = 0


for _name in CALLED:
    if _name not in vars(Guarded):
        setattr(Guarded, _name, functools.partialmethod(Guarded._call, _name))


@functools.cache
def guarded(kind: type) -> type:
    """Return a subclass of a logger's class that is `Guarded`."""
    return type(kind.__name__, (Guarded, kind), {"__module__": kind.__module__})


def build(cfg: DictConfig, *, step: int | None) -> list[Logger]:
    """Build the configured loggers.

    TensorBoard drops what a killed process logged after `step`, of the checkpoint to resume from.
    """
    built = []
    for key, node in (cfg.logger or {}).items():
        if not isinstance(kind := get_object(node._target_), type):
            raise ConfigError(f"logger.{key}._target_={node._target_}: name a class of loggers.")
        more: dict[str, Any] = {"_target_": f"{__name__}.make"}
        if step is not None and issubclass(kind, TensorBoardLogger) and "purge_step" not in node:
            more["purge_step"] = step + 1
        built.append(instantiate(node, kind, **more))
    return built


def make(kind: type, /, *args: Any, **kwargs: Any) -> Logger:
    """Return a guarded logger of a class: Hydra calls it, whose error names the key."""
    return guarded(kind)(*args, **kwargs)


def open_problems(loggers: Iterable[Any]) -> dict[int, str]:
    """Open each logger's experiment, which a Trainer would do, and return by index why those that
    fail do.
    """
    found = {}
    for i, logger in enumerate(loggers):
        try:
            _ = getattr(logger, "experiment", None)
        except Exception as error:  # each service has errors of its own
            found[i] = f"{type(logger).__name__} could not be opened ({masked(error_line(error))})."
    return found


def without_failed(
    loggers: Iterable[Any], problems: dict[int, str], *, resumes: bool
) -> list[Logger]:
    """Replace loggers that could not be opened: that ends a first start, and a resume continues.

    A module that uses self.logger.experiment still finds one.
    """
    if problems and not resumes:
        remedy = "Correct its group, start its service or make room, or type logger=none."
        raise ConfigError([f"logger: {problem} {remedy}" for problem in problems.values()])
    for problem in problems.values():
        log.error("%s The run resumes without it; metrics.csv has the same numbers.", problem)
    return [DummyLogger() if i in problems else logger for i, logger in enumerate(loggers)]
