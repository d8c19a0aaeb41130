"""How a model may be sharded, as data: written next to the model, read by
`armature.parallel.apply`. Torch-free.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

TENSOR_STYLES = {
    "column": "a Linear whose outputs are sharded",
    "row": "a Linear whose inputs are sharded, after a column",
    "column_gathered": "a column whose outputs are gathered at once",
    "row_of_whole": "a row whose inputs are whole, of which each rank takes its part",
    "vocabulary": "an Embedding whose rows are sharded",
    "logits": "a Linear whose outputs are sharded and go into the model's loss",
    "sequence": "a norm over a shard of the positions, or over all of them without sequence "
    "parallelism",
    "heads": "a norm inside of columns: a full copy on every rank, which sees some of the heads",
    "gather": "a module around columns, whose first input is gathered once for all of them",
}

CONTEXT_STYLES = {
    "part": "a module whose first input is (B, T): it gets its rank's part of the positions, and "
    "all that follow do",
    "heads": "attention without weights, called with queries, keys and values (B, heads, T, K) "
    "first",
    "causal": "the same, if it is causal and may get fewer queries than keys: those of the last "
    "positions. Ranks may then be more than heads",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Names are those of the unsharded model's submodules. Patterns may contain `*`.

    Attributes:
        blocks: the ModuleDict (or ModuleList or Sequential, without a pipeline) of repeated blocks:
            the unit of sharding, recomputation, compilation and pipeline stages.
        first, last: submodules that only the first or only the last pipeline stage holds, in
            calling order.
        tensor: module name pattern → style of `TENSOR_STYLES`. Every rank holds a full copy of
            unmatched modules.
        optional: patterns of `tensor` that match nothing in some sizes of the model.
        divided: constructor arguments that the tensor axis must divide.
        sequence: constructor argument that counts the positions (dim 1 of activations); None: the
            model's norms cannot work on a shard of them.
        context: module name pattern → style of `CONTEXT_STYLES`: what a context axis changes. All
            other modules must work on each position by itself. Empty: there can be no context axis.
        heads: constructor argument that counts the heads of "heads", which tensor × context must
            divide, unless they are "causal".
        layers: constructor argument that counts the blocks.
        tied: constructor argument that makes first and last share a parameter, or None.
        no_tensor: why there can be no tensor axis, with what to type instead, or None.
        from_instance: the model makes its plan when it is built, as its attribute `plan`; this one
            says only that.
        needs_inputs: constructor argument that makes every block depend on the model's inputs,
            which only a pipeline's first stage has, or None.
        experts: pattern of the modules that hold a mixture's experts, or None. Each is called with
            rows sorted by expert (M, D) and the number of each expert's rows (E,); dim 0 of its
            parameters counts the experts.
        expert_count: constructor argument that counts the experts, or None.
    """

    blocks: str = "blocks"
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    tensor: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    divided: tuple[str, ...] = ()
    sequence: str | None = None
    context: Mapping[str, str] = field(default_factory=dict)
    heads: str = "heads"
    layers: str = "layers"
    tied: str | None = None
    needs_inputs: str | None = None
    no_tensor: str | None = None
    from_instance: bool = False
    experts: str | None = None
    expert_count: str | None = None

    def __post_init__(self) -> None:
        for axis, known in (("tensor", TENSOR_STYLES), ("context", CONTEXT_STYLES)):
            for pattern, style in getattr(self, axis).items():
                if style not in known:
                    raise ValueError(
                        f"plan.py: {pattern!r}: no {axis} style {style!r}; there are "
                        f"{', '.join(known)}"
                    )


def module_beside(module: str, name: str) -> ModuleType | None:
    """Return `name` (a model's plan or check) in the package of `module`, which defines the model's
    class, or None.
    """
    package = module.rpartition(".")[0]
    if not package or package.split(".")[0] in ("torch", "lightning"):
        return None
    try:
        spec = importlib.util.find_spec(f"{package}.{name}")
    except (ImportError, ValueError):
        return None
    return importlib.import_module(f"{package}.{name}") if spec is not None else None


def plan_beside(module: str) -> Plan | None:
    """Return `PLAN` of the module `plan` next to `module`, which defines the model's class, or
    None.
    """
    found = module_beside(module, "plan")
    return found.PLAN if found is not None else None


def by_rows(initialize_parameter: F) -> F:
    """Mark an `initialize_parameter` to which rows of a parameter may be given in place of the
    whole: what it draws for one does not depend on how many there are. Ranks then draw their own.
    """
    initialize_parameter.by_rows = True  # pyright: ignore[reportFunctionMemberAccess]
    return initialize_parameter
