"""Loggers that a config may name."""

import logging
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from typing import Any, Protocol

from typing_extensions import TypeIs

from armature.validation import values

log = logging.getLogger(__name__)


class RowWriter(Protocol):
    """A logger that takes several optimizer steps in one call."""

    def write_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows of numbers by name; each has the `step` that it belongs to."""


def writes_rows(logger: object) -> TypeIs[RowWriter]:
    """Return whether a logger is a `RowWriter`."""
    return hasattr(type(logger), "write_rows")  # mocks and Lightning's DummyLogger answer to any name


def log_hyperparameters(loggers: Iterable[Any], hyperparameters: dict[str, Any]) -> None:
    """Log a run's configuration, once per start. A service that does not accept it must not end the run."""
    for logger in loggers:
        try:
            logger.log_hyperparams(hyperparameters)
        except Exception as error:  # each service has errors of its own
            log.warning("%s did not take the configuration (%s). config.yaml has it.", type(logger).__name__, error)


def mask_secrets(loggers: Iterable[Any]) -> None:
    """Mask secrets in all hyperparameters that loggers receive: the run's, and those of save_hyperparameters."""
    for logger in loggers:
        logger.log_hyperparams = wraps(logger.log_hyperparams)(partial(_log_masked, logger.log_hyperparams))


def _log_masked(log_hyperparams: Callable[..., Any], params: Any, *args: Any, **kwargs: Any) -> Any:
    plain = vars(params) if isinstance(params, Namespace) else params
    return log_hyperparams(values.without_secrets(plain), *args, **kwargs)
