"""What a model's parts are, as data: written beside the model, read by `armature.parallel.apply`. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TENSOR_STYLES = {
    "column": "a Linear whose outputs are divided",
    "row": "a Linear whose inputs are divided, behind a column",
    "vocabulary": "an Embedding whose rows are divided",
    "logits": "a Linear whose outputs are divided and go into the model's loss",
    "sequence": "a norm that works on a part of the positions, or on all of them without sequence parallelism",
    "gather": "a module around columns, whose first input is brought together once for all of them",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Names are those of the undivided model's submodules; patterns may hold `*`.

    Attributes:
        blocks: the ModuleDict of repeated blocks: the unit of sharding, recomputation, compilation and of stages.
        first, last: submodules that only the first, only the last pipeline stage holds, in the order they are called.
        tensor: pattern of module names to a style of `TENSOR_STYLES`. What no pattern names is held by every rank.
        divided: constructor arguments that the tensor axis must divide.
        sequence: constructor argument that counts the positions (dim 1 of activations); None: the model's norms
            cannot work on a part of them.
        layers: constructor argument that counts the blocks.
        tied: constructor argument that makes first and last share a parameter; None: there is none.
        needs_inputs: constructor argument that lets every block depend on the model's inputs, which only a pipeline's
            first stage sees; None: there is none.
    """

    blocks: str = "blocks"
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    tensor: Mapping[str, str] = field(default_factory=dict)
    divided: tuple[str, ...] = ()
    sequence: str | None = None
    layers: str = "layers"
    tied: str | None = None
    needs_inputs: str | None = None

    def __post_init__(self) -> None:
        for pattern, style in self.tensor.items():
            if style not in TENSOR_STYLES:
                raise ValueError(f"{pattern!r}: no tensor style {style!r}; there are {', '.join(TENSOR_STYLES)}")
