"""Small random models of timm. Called by extras.call."""

import json
import sys
from pathlib import Path
from typing import Any

VIT = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 3, "num_heads": 2}
KINDS: dict[
    str, tuple[str, dict[str, Any], int]
] = {  # timm's name, its arguments, the image's side
    "vit": ("vit_tiny_patch16_224", VIT, 8),
    "resnet": ("test_resnet", {}, 32),  # with running statistics
    "convnext": ("test_convnext", {}, 32),
}
CLASSES = 7


def make(root: str) -> None:
    """Write a folder for each kind, with a head of 7 classes."""
    import torch
    from safetensors.torch import save_file
    from torch import nn

    from armature.models.timm import package

    timm = package.load()
    assert not {"torchvision", "timm.data"} & {*sys.modules}  # what stood for them is gone
    for kind, (architecture, args, side) in KINDS.items():
        torch.manual_seed(1)
        model = timm.create_model(architecture, num_classes=CLASSES, in_chans=1, **args)
        for value in model.parameters():
            if value.ndim > 1:
                nn.init.normal_(value, 0.0, 0.2 if kind == "vit" else (value[0].numel()) ** -0.5)
        folder = Path(root, kind)
        folder.mkdir()
        save_file(
            {name: value.contiguous() for name, value in model.state_dict().items()},
            folder / "model.safetensors",
        )
        made = {
            "input_size": [1, side, side],
            "fixed_input_size": kind == "vit",
            "mean": [0.5],
            "std": [0.5],
            "classifier": model.pretrained_cfg["classifier"],
            "num_classes": CLASSES,
        }
        config = {"architecture": architecture, "num_classes": CLASSES, "pretrained_cfg": made}
        (folder / "config.json").write_text(
            json.dumps(config | {"model_args": {**args, "in_chans": 1}})
        )


def logits(root: str) -> dict[str, float]:
    """Return the largest difference of logits to timm's own, for each kind."""
    import torch
    from safetensors.torch import load_file

    from armature.models.timm import package
    from armature.models.timm.model import ImageClassifier
    from tests.finetune import folders

    timm, found = package.load(), {}
    for kind, (architecture, args, side) in KINDS.items():
        model = folders.read(
            ImageClassifier, pretrained=f"{root}/{kind}", classes=CLASSES, new_head=False
        )
        theirs = timm.create_model(architecture, num_classes=CLASSES, in_chans=1, **args)
        theirs.load_state_dict(load_file(f"{root}/{kind}/model.safetensors"))
        images = torch.randn(4, 1, side, side, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            found[kind] = float((model(images) - theirs.eval()(images)).abs().max())
    return found


def fit(root: str, kind: str, layouts: list[str]) -> dict[str, Any]:
    """Return how far each layout's training is from one process's."""
    from tests.finetune import layouts as compare

    return compare.fit(
        layouts,
        model="armature.models.timm.model.ImageClassifier",
        model_args={
            "pretrained": f"{root}/{kind}",
            "image_size": KINDS[kind][2],
            "channels": 1,
            "classes": 5,
        },
    )
