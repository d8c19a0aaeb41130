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
    return [*_settings(task), *_worker_problems(task, data)] if ours else []


def decided_reference(reference: str, *, adapter: Any, train: Any) -> str:
    """Return how the reference is known: what "auto" means, or `reference` itself.

    Args:
        adapter: `task.adapter`, or what was built of it; None: all weights are trained.
        train: `task.adapter.train`, which changes the model without its adapters, too.
    """
    if reference != "auto":
        return reference
    return "adapters_off" if adapter is not None and not train else "cached"


def _worker_problems(task: Mapping[str, Any], data: Mapping[str, Any]) -> list[str]:
    adapter = task.get("adapter")
    train = None if adapter is None else adapter.get("train")
    decided = decided_reference(task.get("reference", "auto"), adapter=adapter, train=train)
    if decided != "cached" or not data.get("num_workers"):
        return []
    return [
        f"data.num_workers={data['num_workers']}: workers would begin without the reference's "
        "log-probabilities "
        "(task.reference=cached). Type data.num_workers=0: tokens come from memory-mapped files."
    ]


def _settings(task: Mapping[str, Any]) -> Iterator[str]:
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
    if task.get("reference") == "adapters_off" and not adapter:
        yield "task.reference=adapters_off, but task.adapter=null. Type task.reference=cached."
    elif task.get("reference") == "adapters_off" and adapter.get("train"):
        yield (
            f"task.reference=adapters_off, but task.adapter.train={adapter['train']} changes the "
            "model without its adapters, too. Type task.reference=cached."
        )
