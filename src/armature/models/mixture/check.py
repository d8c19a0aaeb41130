"""Rules for a mixture's sizes, for the constructor and, torch-free, for the check before launch."""

from collections.abc import Mapping
from typing import Any

from armature.models.decoder import check as decoder
from armature.models.sizes import nearest_multiple

MULTIPLE = 8  # elements: rows of 16 bytes, which grouped matrix products need


def problems(args: Mapping[str, Any]) -> list[str]:
    """Return every reason why `MixtureDecoder(**args)` cannot be built, each with both values and a
    remedy.
    """
    found, dense, layers = decoder.problems(args), args.get("dense_layers", 0), args.get("layers")
    if layers is not None and dense >= layers:
        found.append(
            f"model.dense_layers={dense} leaves none of the model.layers={layers} blocks a "
            "mixture: type a smaller "
            "model.dense_layers, or model._target_=armature.models.decoder.model.Decoder"
        )
    if args.get("pretrained") is not None:
        found.append("model.pretrained: mixtures of experts begin at random. Leave it out")
    experts, active = args.get("experts"), args.get("active")
    if experts is not None and active is not None and active > experts:
        found.append(
            f"model.active={active} is more than model.experts={experts}: type "
            f"model.active={experts} or less"
        )
    if active == 1 and args.get("normalized", True):
        found.append(
            "model.active=1 with model.normalized=true: the weight of a token's only expert is "
            "always 1, so the router "
            "would learn nothing. Type model.normalized=false, or model.active=2"
        )
    for key in ("width", "expert_hidden"):
        if (value := args.get(key)) is not None and value % MULTIPLE:
            found.append(
                f"model.{key}={value} must be a multiple of {MULTIPLE}, which grouped matrix "
                f"products need: type model.{key}={nearest_multiple(value, MULTIPLE)}"
            )
    return found
