"""A Trainer in the test's own process, without logger, files and screen."""

from typing import Any

from armature.strategies.single import SingleDevice
from armature.training.trainer import Trainer
from tests.support.parity.harness import QUIET


def quiet_trainer(**settings: Any) -> Trainer:
    """Return a Trainer on CPUs, in one process unless the settings name another strategy."""
    return Trainer(**{**QUIET, "strategy": SingleDevice(), **settings})
