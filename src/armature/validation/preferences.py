"""Check that preference data and a task that learns from them meet, and the task's settings.

Torch-free.

A task that reads pairs says so in a class attribute, `reads = "pairs"`, and data that give them by
`gives = "pairs"`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from armature.validation import signatures


def problems(cfg: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with pairs in a resolved configuration whose classes are sound."""
    task, data = cfg["task"], cfg["data"]
    reads = signatures.class_attribute(task["_target_"], "reads") == "pairs"
    gives = signatures.class_attribute(data["_target_"], "gives") == "pairs"
    names = (
        f"task={task['_target_'].rpartition('.')[2]}",
        f"data={data['_target_'].rpartition('.')[2]}",
    )
    if reads and not gives:
        return [
            f"{names[0]} learns from pairs of answers, and {names[1]} gives none. Type "
            "data=preference. (A class of "
            'yours whose batches hold pairs says so: gives = "pairs".)'
        ]
    if gives and not reads:
        return [
            f"{names[1]} gives pairs of answers, which {names[0]} does not compare. Type task=dpo, "
            "or data=chat for "
            'conversations. (A task of yours that reads pairs says so: reads = "pairs".)'
        ]
    ours = task["_target_"] == "armature.tasks.direct_preference.DirectPreference"
    return [*_settings(task, cfg["model"])] if ours else []


def reference_problem(train: Any) -> str | None:
    """Return why the model without its adapters is not the reference, or None.

    Args:
        train: `task.adapter.train`, which changes the model without its adapters, too.
    """
    if train:
        return (
            f"task.adapter.train={train} changes the model without its adapters, too, which is the "
            "reference. Type task.adapter.train=null."
        )
    return None


def _settings(task: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[str]:
    smoothing, adapter = task.get("label_smoothing"), task.get("adapter") or {}
    if smoothing and task.get("loss") == "ipo":
        yield (
            f"task.label_smoothing={smoothing} is of task.loss=sigmoid. Type "
            "task.label_smoothing=0."
        )
    if quantize := adapter.get("quantize"):
        yield (
            f"task.adapter.quantize={quantize}: preferences have not been compared on weights of 4 "
            "bits. Type task.adapter.quantize=null."
        )
    if not adapter and not model.get("pretrained"):
        yield (
            "task.adapter=null: all weights are trained, and the reference is a copy of the model "
            "of a folder. Type model.pretrained=FOLDER, or leave task.adapter=null out."
        )
    if problem := reference_problem(adapter.get("train")):
        yield problem
