"""Loggers that a config may name."""

import logging
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from typing import Any, Protocol

from typing_extensions import TypeIs

from armature.errors import error_line, masked
from armature.validation import values

WRITES = ("log_metrics", "write_rows")
# by a Trainer, StepLog
CALLED = (*WRITES, "log_hyperparams", "log_graph", "save", "after_save_checkpoint", "finalize")
# of a file: opening it and writing to it take longer than a short step
SECONDS_BETWEEN_WRITES = 1.0
MOST_FAILURES = 3  # in a row: a service that is away may take minutes for each
log = logging.getLogger(__name__)


class RowWriter(Protocol):
    """A logger that takes several optimizer steps in one call."""

    def write_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take rows of numbers by name; each has the `step` that it belongs to.

        They are written by the next `save`.
        """

    def save(self) -> None:
        """Write the rows that were taken: before a checkpoint is saved, among others."""


def writes_rows(logger: object) -> TypeIs[RowWriter]:
    """Return whether a logger is a `RowWriter`."""
    # mocks and Lightning's DummyLogger answer to any name
    return hasattr(type(logger), "write_rows")


def log_hyperparameters(loggers: Iterable[Any], hyperparameters: dict[str, Any]) -> None:
    """Log a run's configuration, once per start.

    A service that does not accept it must not end the run.
    """
    for logger in loggers:
        try:
            logger.log_hyperparams(hyperparameters)
        except Exception as error:  # each service has errors of its own
            why = masked(str(error))
            log.warning(
                "%s did not take the configuration (%s). config.yaml has it.",
                type(logger).__name__,
                why,
            )


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


def forgive_failures(loggers: Iterable[Any]) -> None:
    """Let the run continue if a service fails: say so once, and stop calling it after MOST_FAILURES
    in a row.
    """
    for logger in loggers:
        failures = Failures(type(logger).__name__)
        for name in CALLED:
            if callable(method := getattr(logger, name, None)):
                call = partial(_log_graph, logger, method) if name == "log_graph" else method
                setattr(logger, name, wraps(method)(partial(failures.call, call, name)))


def _log_graph(logger: Any, method: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Log the model's graph, unless its forward needs all ranks: only rank 0 traces it."""
    strategy = getattr(getattr(model, "_trainer", None), "strategy", None)
    if getattr(strategy, "sharded", False) or getattr(strategy, "zero_stage_3", False):
        if getattr(logger, "_log_graph", False):
            log.warning(
                "%s logs no graph: rank 0 has a part of the weights only, and would trace the "
                "model alone. Type "
                "strategy=single trainer.devices=1 trainer.max_steps=1 for a graph.",
                type(logger).__name__,
            )
        return
    method(model, *args, **kwargs)


class Failures:
    """Counts a logger's failures."""

    def __init__(self, name: str) -> None:
        self.name, self.in_a_row, self.reported = name, 0, False

    def call(self, method: Callable[..., Any], what: str, *args: Any, **kwargs: Any) -> Any:
        if self.in_a_row >= MOST_FAILURES:
            return None
        before = self.in_a_row
        try:
            result = method(*args, **kwargs)
        except Exception as error:  # each service has errors of its own
            self.in_a_row += 1
            if not self.reported:
                self.reported = True
                kept = (
                    "config.yaml has them"
                    if what == "log_hyperparams"
                    else "metrics.csv has the same numbers"
                )
                why = masked(error_line(error))
                log.error(
                    "%s failed in %s (%s). The run continues; %s.", self.name, what, why, kept
                )
            if self.in_a_row == MOST_FAILURES:
                log.error(
                    "%s failed %d times in a row and is not used again in this start.",
                    self.name,
                    MOST_FAILURES,
                )
            return None
        # log_metrics may call write_rows, whose failure counts
        if what in WRITES and self.in_a_row == before:
            self.in_a_row = 0
        return result


def mask_secrets(loggers: Iterable[Any]) -> None:
    """Mask secrets in all hyperparameters that loggers receive: the run's, and those of
    save_hyperparameters.
    """
    for logger in loggers:
        logger.log_hyperparams = wraps(logger.log_hyperparams)(
            partial(_log_masked, logger.log_hyperparams)
        )


def _log_masked(log_hyperparams: Callable[..., Any], params: Any, *args: Any, **kwargs: Any) -> Any:
    plain = vars(params) if isinstance(params, Namespace) else params
    return log_hyperparams(values.without_secrets(plain), *args, **kwargs)
