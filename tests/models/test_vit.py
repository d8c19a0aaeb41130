import math

import pytest
import torch

from armature.models.vit.model import VisionTransformer

SMALL = {
    "image_size": 8,
    "patch_size": 2,
    "channels": 1,
    "classes": 10,
    "width": 32,
    "layers": 2,
    "heads": 4,
}


def small(**changes) -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(**{**SMALL, **changes})


def test_every_parameter_is_initialized_by_name():
    with torch.device("meta"):
        model = small()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, param in model.named_parameters():
            model.initialize_parameter(
                name, param.fill_(math.nan), torch.Generator().manual_seed(0)
            )
    assert all(param.isfinite().all() for param in model.parameters())
    assert model.head.bias.eq(0).all()
    assert model.norm.weight.eq(1).all()
    assert not list(model.buffers())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"patch_size": 3},
            r"model.patch_size=3 does not divide model.image_size=8: model.patch_size=2 does",
        ),
        ({"heads": 5}, r"model.heads=5 does not divide model.width=32: model.heads=4 does"),
        ({"classes": 0}, r"model.classes must be a whole number of at least 1. Got 0"),
    ],
)
def test_impossible_sizes_are_refused_with_a_remedy(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)
