"""What a habit is: a module, callback or data module as a user of Lightning writes it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.lightning_habits.regression import Regressor

INSIDE, SAVED, OWED, OWED_AT_END = RESUMES = ("inside", "saved", "owed", "owed_at_end")
NO_CLIP = "trainer.gradient_clip_val=null"
MICRO = "data.micro_batch_size=2"
WHOLE = ("strategy.min_num_params=8_000_000",)  # the default: small networks stay whole
FIND_UNUSED = ("strategy.find_unused_parameters=true",)


@dataclass(frozen=True, kw_only=True)
class Habit:
    """How a habit is run. It is resumed in one process, and compared with two ranks.

    Attributes:
        data: samples of data.py (`SAMPLES`), or a LightningDataModule.
        layout: of the two ranks, "ddp2" or "fsdp2"; empty: they cannot take it.
        also: overrides for the two ranks.
        resume: one of `RESUMES`; empty: it is dealt out in turn (habits.py).
        stop: completed batches at which `resume="inside"` stops.
        twice: whether the two ranks are resumed, too.
        random: draws random numbers while training, or depends on each rank's own samples. Two
            ranks cannot agree with one process then: they are resumed instead.
        apart: columns of metrics.csv without sync_dist, which are rank 0's.
        sample: whether `make test` runs it.
    """

    name: str
    task: type
    overrides: tuple[str, ...]
    layout: str
    data: str | type = "regression"
    also: tuple[str, ...] = ()
    resume: str = ""
    stop: int = 9
    twice: bool = False
    random: bool = False
    apart: tuple[str, ...] = ()
    sample: bool = False

    def command(self) -> list[str]:
        data = ["data=samples", f"data.samples={self.data}"]
        if isinstance(self.data, type):
            data = ["data=plain", f"data._target_={target(self.data)}"]
        return [*data, f"task._target_={target(self.task)}", *self.overrides]


def ddp(task: type = Regressor, *overrides: str, **settings: Any) -> Habit:
    return _habit(task, overrides, "ddp2", settings)


def fsdp(task: type = Regressor, *overrides: str, **settings: Any) -> Habit:
    return _habit(task, overrides, "fsdp2", settings)


def single(task: type, *overrides: str, **settings: Any) -> Habit:
    return _habit(task, overrides, "", settings)


def _habit(task: type, overrides: tuple[str, ...], layout: str, settings: dict) -> Habit:
    named = settings["data"] if task is Regressor and "data" in settings else task
    named = {"name": named.__name__, **settings}
    return Habit(task=task, overrides=overrides, layout=layout, **named)


def callback(made: Callable, **arguments: object) -> str:
    return _callback(target(made), arguments)


def stock(name: str, **arguments: object) -> str:
    """Return the override that adds a callback of Lightning."""
    return _callback(f"lightning.pytorch.callbacks.{name}", arguments)


def _callback(path: str, arguments: dict) -> str:
    given = "".join(f",{key}:{value}" for key, value in arguments.items())
    return f"+callbacks.{path.rpartition('.')[2].lower()}={{_target_:{path}{given}}}"


def target(made: Callable) -> str:
    return f"{made.__module__}.{made.__qualname__}"
