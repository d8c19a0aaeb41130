import math

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


def test_every_parameter_is_initialized_by_name():
    with torch.device("meta"):
        model = VisionTransformer(**SMALL)
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
