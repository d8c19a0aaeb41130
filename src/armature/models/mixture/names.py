"""A mixture's parameters under the names of Hugging Face's Qwen3-MoE, which stores each expert's
matrices alone.

A decoder without experts has names and shapes here, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from armature.models.decoder import names as decoder

_STACK = re.compile(r"blocks\.(\d+)\.mixture\.experts\.(gate|up|down)")
_ROUTER = re.compile(r"blocks\.(\d+)\.mixture\.router\.weight")


def theirs(name: str) -> str | None:
    """Return Hugging Face's name of one of the model's parameters; None for one that they do not
    have.

    That of a stack of matrices has {} in place of the expert's number.
    """
    if (stack := _STACK.fullmatch(name)) is not None:
        return f"model.layers.{stack[1]}.mlp.experts.{{}}.{stack[2]}_proj.weight"
    if (router := _ROUTER.fullmatch(name)) is not None:
        return f"model.layers.{router[1]}.mlp.gate.weight"
    return decoder.theirs(name)


def parts(name: str, count: int) -> list[str] | None:
    """Return Hugging Face's names of the `count` matrices that a parameter stacks, or None if it is
    no stack.
    """
    pattern = theirs(name)
    return (
        [pattern.format(i) for i in range(count)]
        if pattern is not None and "{}" in pattern
        else None
    )


def shapes(args: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return every parameter of `MixtureDecoder(**args)` by our name; without experts, of
    `Decoder(**args)`.

    Torch-free, for the check before launch.
    """
    if "experts" not in args:
        return decoder.shapes(args)
    found = decoder.shapes({**args, "ffn_hidden": args["ffn_hidden"] or 1})
    width, hidden, experts, shared = (
        args[k] for k in ("width", "expert_hidden", "experts", "shared_hidden")
    )
    for i in range(args["dense_layers"], args["layers"]):
        for part in ("gate", "up", "down"):
            del found[f"blocks.{i}.ffn.{part}.weight"]
            found[f"blocks.{i}.mixture.experts.{part}"] = (
                (experts, width, hidden) if part == "down" else (experts, hidden, width)
            )
            if shared is not None:
                shape = (width, shared) if part == "down" else (shared, width)
                found[f"blocks.{i}.mixture.shared.{part}.weight"] = shape
        found[f"blocks.{i}.mixture.router.weight"] = (experts, width)
    return found
