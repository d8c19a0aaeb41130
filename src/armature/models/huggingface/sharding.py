"""How a model of transformers may be sharded: translated from what transformers says of it, once it
is built.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from armature.models.plan import Plan

# transformers' name of a tensor style → ours; of the head and others inside, see `_styles`
STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "rowwise_split_input": "row_of_whole",
    "embedding_rowwise": "vocabulary",
    "colwise_gather_output": "column_gathered",
    "colwise_rep": "column_gathered",
    "rowwise_rep": "row_of_whole",
    "replicated_with_grad_allreduce": "heads",
}
WHOLE = ("replicate",)  # a full copy on every rank, as of all modules without a style


def plan_of(model: Any, *, prefix: str) -> Plan | None:
    """Return the plan of a PreTrainedModel that is the submodule `prefix` of the model that is
    sharded.

    None if transformers names no repeated blocks: the model is then one unit.
    """
    if (blocks := _blocks(model)) is None:
        return None
    styles, unknown = _styles(model)
    why = None
    if unknown or not styles:
        what = (
            f"shards {', '.join(unknown)}, which cannot be done here"
            if unknown
            else "has no plan for it"
        )
        why = f"{type(model).__name__}: transformers {what}. Type strategy=fsdp"
    return Plan(
        blocks=f"{prefix}.{blocks}",
        tensor={} if why else {f"{prefix}.{name}": style for name, style in styles.items()},
        divided=("heads", "kv_heads"),
        no_tensor=why,
    )


def _blocks(model: Any) -> str | None:
    """Return the longest list of the blocks that transformers never splits over devices."""
    names = set(model._no_split_modules or ())
    lists = {
        name: len(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and all(type(block).__name__ in names for block in module)
    }
    return max(lists, key=lambda name: lists[name], default=None)


def _styles(model: Any) -> tuple[dict[str, str], list[str]]:
    """Return the tensor style of each module by its name, and the modules with styles that are not
    here.
    """
    modules, styles, unknown = dict(model.named_modules()), dict[str, str](), list[str]()
    asked: Mapping[str, str] = model.tp_plan or {}
    for pattern, style in asked.items():
        matching = [name for name in modules if fnmatchcase(name, pattern)]
        if style in STYLES:
            styles |= dict.fromkeys(matching, STYLES[style])
        elif matching and style not in WHOLE:
            unknown.append(f"{pattern} as {style}")
    return _with_ends(
        model, {id(module): name for name, module in modules.items()}, styles
    ), unknown


def _with_ends(model: Any, names: Mapping[int, str], styles: dict[str, str]) -> dict[str, str]:
    """Let the head's outputs stay sharded for the loss, and shard the embedding as the head if they
    are tied.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    last, first = names.get(id(head), ""), names.get(id(embedding), "")
    # an embedding that scales its rows, or has one without a gradient, computes something else with
    # a shard of them
    plain = type(embedding) is nn.Embedding and embedding.padding_idx is None
    if styles.get(last) == "column_gathered":
        styles[last] = "logits"
    if head is not None and head.weight is embedding.weight and last in styles:
        styles[first] = "vocabulary"
    if first in styles and not plain:
        del styles[first]
        if head is not None and head.weight is embedding.weight:
            styles.pop(last, None)
    return styles
