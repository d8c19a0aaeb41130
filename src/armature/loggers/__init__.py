"""Loggers that a config may name."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

log = logging.getLogger(__name__)


@runtime_checkable
class RowWriter(Protocol):
    """A logger that takes several optimizer steps in one call."""

    def write_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows of numbers by name; each has the `step` that it belongs to."""


def log_hyperparameters(loggers: Iterable[Any], hyperparameters: dict[str, Any]) -> None:
    """Log a run's configuration, once per start. A service that does not accept it must not end the run."""
    for logger in loggers:
        try:
            logger.log_hyperparams(hyperparameters)
        except Exception as error:  # each service has errors of its own
            log.warning("%s did not take the configuration (%s). config.yaml has it.", type(logger).__name__, error)
