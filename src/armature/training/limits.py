"""How long a run trains: trainer.max_steps and trainer.max_epochs."""

import logging
import math
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from armature.config import key_of

log = logging.getLogger(__name__)

KEYS = ("max_steps", "max_epochs")


@dataclass(frozen=True)
class Limits:
    """The end of a run.

    Attributes:
        global_batches: global batches of the whole run.
        epochs: the Trainer's max_epochs, which modules read: as typed, else what `global_batches`
            begin.
    """

    global_batches: int
    epochs: int

    @classmethod
    def of(
        cls, cfg: DictConfig, *, samples_per_epoch: int, global_batch_size: int,
        step: int = 0, seen: int = 0,
    ) -> "Limits":  # fmt: skip
        """Return the limits of a configuration. The one that is reached first ends the run.

        Args:
            step: at which the run resumes. Lightning refuses to resume beyond its max_epochs.
            seen: samples until then, maybe in batches of another size.
        """
        steps, epochs = cfg.trainer.max_steps, cfg.trainer.max_epochs
        limits = [] if steps is None else [steps]
        if epochs is not None:
            left = max(0, epochs * samples_per_epoch - seen)
            limits.append(step + math.ceil(left / global_batch_size))
        total = min(limits)
        end = seen + (max(step, total) - step) * global_batch_size
        epochs = epochs or math.ceil(end / samples_per_epoch)
        if step > total:
            log.warning(
                "The run has made %d steps already, and its limits end it at step %d: nothing is "
                "left to train. Type a larger trainer.max_steps or trainer.max_epochs.",
                step, total,
            )  # fmt: skip
            epochs = max(epochs, math.ceil(seen / samples_per_epoch) + 1)
        return cls(total, epochs)


def prefer_typed(cfg: DictConfig, overrides: list[str]) -> DictConfig:
    """Return the configuration without the limit that a file sets, if the other one was typed."""
    names = [*map(key_of, overrides)]
    # as written: what cannot be resolved is told by the checks
    given: Any = OmegaConf.to_container(cfg.trainer, resolve=False)
    typed = [key for key in KEYS if f"trainer.{key}" in names and given[key] is not None]
    if len(typed) == 1:
        (other,) = set(KEYS) - set(typed)
        if given[other] is not None:
            cfg = cfg.copy()
            cfg.trainer[other] = None
    return cfg


def report_replaced(cfg: DictConfig, preferred: DictConfig) -> None:
    """Log which limit `prefer_typed` has left out, once nothing is refused."""
    for key in KEYS:
        if (left_out := cfg.trainer[key]) != preferred.trainer[key]:
            log.info("The limit that was typed replaces trainer.%s=%s.", key, left_out)
