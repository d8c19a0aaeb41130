"""Stand-ins for a logger and its service: a module that logs images also runs where nothing takes
them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

_INSTEAD = (
    "evaluate.py and predict.py log nothing. A run logs it, also from its test "
    "(trainer.test_at_end=true)"
)


class Nothing:
    """Can be called, read, written and entered, as what services return: a configuration, a
    summary, a series.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Nothing:
        return self

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> Nothing:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        """Keep nothing."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *error: object) -> None:
        """Let errors pass."""

    def __fspath__(self) -> str:  # of a folder of the service
        return os.devnull


class NoExperiment:
    """Has every method, and none does anything: a module that logs images also runs without a
    service.

    Args:
        instead: why, and what to type instead.
        of: what the user has written before the method's name.
    """

    def __init__(self, instead: str, *, of: str = "self.logger.experiment") -> None:
        self._instead, self._of = instead, of

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        rank_zero_warn(f"{self._of}.{name} does nothing: {self._instead}.", stacklevel=2)
        return Nothing()

    def __getitem__(self, key: Any) -> Nothing:
        return getattr(self, f"[{key!r}]")

    def __setitem__(self, key: Any, value: Any) -> None:
        """Keep nothing."""


class NoLogger(Logger):
    """The logger of a module that is measured or predicts after its run: it writes nothing.

    Args:
        run_dir: the folder that the module gets as `self.logger.save_dir` and
            `self.trainer.log_dir`.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self._run_dir = str(run_dir)

    @property
    def name(self) -> str:
        return "none"

    @property
    def version(self) -> str:
        return ""

    @property
    @override
    def save_dir(self) -> str:
        return self._run_dir

    log_dir = root_dir = save_dir  # pyright: ignore[reportIncompatibleMethodOverride] (None in the base class)

    @property
    def experiment(self) -> NoExperiment:
        return NoExperiment(_INSTEAD)

    @override
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log nothing: the script prints what it has measured."""

    @override
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Log nothing."""

    def __getattr__(self, name: str) -> Nothing:  # log_image, log_table, watch, …
        return getattr(NoExperiment(_INSTEAD, of="self.logger"), name)
