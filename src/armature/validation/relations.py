"""Check values against those of other groups: monitored metrics, factories, sizes, schedules.

A data module says what its samples need of a model in a class attribute: a number, or the name of
the data's own setting that holds it.

    model_sizes = {"image_size": "size", "channels": 1, "classes": 10}
"""

import difflib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cache
from typing import Any

from armature.config import key_of
from armature.errors import ConfigError
from armature.validation import signatures

log = logging.getLogger(__name__)


# of each row of metrics.csv: callbacks may monitor them. Not its `epoch`, which is of an earlier
# step, and which ModelCheckpoint would write into the names of its files
OF_STEPS = ("lr", "train/loss", "train/grad_norm")
OURS = "armature.optim.schedules."
# callbacks that log nothing to monitor
SILENT = ("armature.", "lightning.pytorch.callbacks.EarlyStopping")


@cache
def warn(text: str) -> None:
    """Log a warning once: a sweep's values are checked one by one."""
    log.warning(text)


def problems(cfg: dict[str, Any], overrides: Sequence[str] = ()) -> list[str]:
    """Return what cannot work together in a resolved configuration whose classes are sound."""
    typed, mode = {*map(key_of, overrides)}, cfg["checkpoint"]["mode"]
    monitor = cfg["checkpoint"]["keep_best"] and str(cfg["checkpoint"]["monitor"])
    named = typed & {"checkpoint.monitor", "checkpoint.mode"}
    if monitor and mode == "min" and named == {"checkpoint.monitor"} and "loss" not in monitor:
        warn(
            f"checkpoint.monitor={monitor}: its lowest value is best (checkpoint.mode=min). "
            "Type checkpoint.mode=max if its highest is."
        )
    return [
        *_monitors(cfg),
        *_factories(cfg),
        *_sizes(cfg),
        *_schedule(cfg, typed),
    ]


def _monitors(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield monitored names that our tasks do not log.

    What other tasks and callbacks log is not known.
    """
    callbacks = cfg.get("callbacks") or {}
    task = str(cfg["task"]["_target_"])
    is_ours = task.startswith("armature.tasks.")
    known = signatures.class_attribute(task, "metric_names") if is_ours else None
    if not known or any(not str(e["_target_"]).startswith(SILENT) for e in callbacks.values()):
        return
    asked = {f"callbacks.{name}": node.get("monitor") for name, node in callbacks.items()}
    for key, name in ({"checkpoint": cfg["checkpoint"]["monitor"]} | asked).items():
        names = [*(f"val/{each}" for each in known), *OF_STEPS]
        if key == "checkpoint":  # what a trial of a sweep may be compared by
            names += [f"test/{each}" for each in known]
        if isinstance(name, str) and name not in names:
            near = difflib.get_close_matches(name, names, 1, 0.5)
            hint = f" Did you mean {key}.monitor={near[0]}?" if near else ""
            yield f"{key}.monitor={name}: no metric has this name: {', '.join(names)}.{hint}"


def _factories(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield groups that our tasks call later, and that would be built at once, or cannot be called
    so.
    """
    definition = signatures.find_definition(cfg["task"]["_target_"])
    if definition is None or not signatures.derives(definition, ("Task", "PointClassification")):
        return
    model, scheduler = cfg["model"], cfg.get("scheduler")
    built = signatures.find_definition(model["_target_"])
    if inspect.isclass(built) and not model.get("_partial_"):
        yield (
            "model._partial_=false: the task builds the model later, on its device. "
            "Type model._partial_=true."
        )
    takes = signatures.signature_at(scheduler["_target_"] if scheduler else "")
    known = takes.parameters
    if scheduler and known and not takes.open and "total_steps" not in known:
        yield (
            f"scheduler._target_={scheduler['_target_']}: the task passes total_steps, which it "
            "does not take. Type scheduler=cosine, linear, wsd or constant, or a function of your "
            "own package in src/ that takes (optimizer, total_steps)."
        )


def _sizes(cfg: dict[str, Any]) -> Iterator[str]:
    """Yield sizes of the model that do not fit the data."""
    data = cfg["data"]
    needed = signatures.class_attribute(data["_target_"], "model_sizes") or {}
    if isinstance(source := data.get("source"), dict) and "vocab_size" in source:
        needed |= {"vocab_size": source["vocab_size"], "context": data.get("context")}
    sizes = {
        key: data.get(value) if isinstance(value, str) else value for key, value in needed.items()
    }
    model = cfg["model"]
    if model.get("pretrained") is not None:  # whose sizes cannot be typed
        for key in ("image_size", "channels"):
            value, fixed = sizes.get(key), model.get(key)
            if isinstance(value, int) and isinstance(fixed, int) and value != fixed:
                named = isinstance(needed[key], str)
                remedy = (
                    f"Type data.{needed[key]}={fixed}"
                    if named
                    else "Name a folder, or data, of the other's"
                )
                other = f"model.pretrained={model['pretrained']} {fixed}"
                yield f"The data have {key}={value}, and {other}. {remedy}."
                del sizes[key]
    yield from size_problems(model, sizes)


def size_problems(model: Any, needed: Mapping[str, Any]) -> list[str]:
    """Return the sizes of a model's configuration that are not those that the data need."""
    found = []
    for key, value in needed.items():
        given = model.get(key)
        least = key in ("classes", "vocab_size", "context")  # more than needed is no mistake
        if (
            isinstance(given, int)
            and isinstance(value, int)
            and (given < value if least else given != value)
        ):
            fixed = key == "vocab_size" and model.get("pretrained")  # by the folder
            remedy = f"data.source.{key}={given}" if fixed else f"model.{key}={value}"
            found.append(
                f"model.{key}={given}, but the data need {'at least ' * least}{value}. Type "
                f"{remedy}."
            )
    return found


def check_found_sizes(model: Any, found: Mapping[str, Any]) -> None:
    """Raise ConfigError if the model's sizes do not fit what the data turned out to hold."""
    if not isinstance(model, Mapping):
        return
    ours = str(model.get("_target_")).partition(".")[0] in ("armature", "example")
    # `features` of another model may be anything
    if problems := size_problems(model, {k: v for k, v in found.items() if ours or k == "classes"}):
        raise ConfigError(problems)


def _schedule(cfg: dict[str, Any], typed: Set[str]) -> Iterator[str]:
    """Yield lengths of our schedules that are longer than the run.

    Those of a file may be longer than a run that is typed shorter, for a look: that is named while
    it trains.
    """
    node, steps = cfg.get("scheduler") or {}, cfg["trainer"]["max_steps"]
    lengths = {f"scheduler.{key}": node.get(key, 0) for key in ("warmup", "decay")}
    looks = typed & {"debug", "trainer.max_steps"} and not typed & {*lengths}
    if looks or not steps or not str(node.get("_target_")).startswith(OURS):
        return
    if sum(value * steps if value < 1 else value for value in lengths.values()) > steps:
        shown = " and ".join(f"{key}={value}" for key, value in lengths.items() if value)
        yield (
            f"{shown}: longer than the run's trainer.max_steps={steps}. Type shares of the run "
            "(below 1.0), or more steps."
        )
