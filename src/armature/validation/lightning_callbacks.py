"""What Lightning's callbacks that change weights cannot be combined with.

These classes and those derived from them would train something else in silence, or save what cannot
be resumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from armature.layout import Layout
from armature.validation import signatures
from armature.validation.lightning_parts import REFUSED_CALLBACKS

_CALLBACKS = "lightning.pytorch.callbacks"
AVERAGING = f"{_CALLBACKS}.weight_averaging.WeightAveraging"
SWA = f"{_CALLBACKS}.stochastic_weight_avg.StochasticWeightAveraging"
FINETUNING = f"{_CALLBACKS}.finetuning.BaseFinetuning"
WHOLE = ("single", "ddp")  # every rank holds the whole model
# strategies that reduce gradients of weights that are unfrozen
UNFREEZE = (*WHOLE, "shard", "context")
OURS = "Type callbacks=ema, which averages under every strategy"


def problems(cfg: Mapping[str, Any], layout: Layout) -> list[str]:
    """Return what is wrong with the callbacks of a configuration."""
    found = []
    for key, target in signatures.targets_in(cfg, "callbacks"):
        if reason := _reason(_names(signatures.lineage(target, libraries=True)), cfg, layout):
            found.append(f"{key}={target.rpartition('.')[2]} {reason}.")
    return found


def problem_of_object(kind: type, cfg: Mapping[str, Any], layout: Layout) -> str | None:
    """Return what is wrong with a callback that the configuration does not name, by its class."""
    classes = _names(kind.__mro__)
    reason = _reason(classes, cfg, layout)
    for name, why in REFUSED_CALLBACKS.items():
        if any(each.startswith(_CALLBACKS) and each.endswith(f".{name}") for each in classes):
            reason = f"does not work here: {why}"
    task = cfg["task"]["_target_"]
    return (
        reason
        and f"callbacks: {kind.__name__}, from configure_callbacks of {task} or from a function, "
        f"{reason}."
    )


def _names(kinds: Iterable[type]) -> list[str]:
    return [signatures.name_of(each) for each in kinds]


def _reason(classes: list[str], cfg: Mapping[str, Any], layout: Layout) -> str | None:
    if not {AVERAGING, SWA, FINETUNING} & set(classes):
        return None
    task, model, method = cfg["task"]["_target_"], cfg["model"]["_target_"], layout.methods[0]
    builds_late = signatures.defines(task, "configure_model")
    if SWA in classes:
        return f"averages by epochs, and its schedule is not resumed exactly. {OURS}"
    if AVERAGING in classes and method not in WHOLE:
        return (
            f"copies the whole model, but with this strategy ({method}) ranks hold parts of "
            f"it. {OURS}"
        )
    if AVERAGING in classes and builds_late and signatures.defines(model, "initialize_parameter"):
        return (
            f"copies the model before it has weights: {task.rpartition('.')[2]} builds it "
            f"later. {OURS}"
        )
    if FINETUNING in classes and (
        other := next((m for m in layout.methods if m not in UNFREEZE), None)
    ):
        return (
            f"unfreezes weights during training, but with this strategy ({other}) only weights "
            "that are trained from the first step on are kept equal on all ranks. Type "
            "strategy=ddp or strategy=fsdp, or give these weights a group with learning rate 0 "
            "until they train"
        )
    return None
