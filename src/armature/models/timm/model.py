"""Classifiers of images that timm builds and computes, from a folder as timm writes it.

Never remote code.

Shapes: B batch, C channels, I image side, N classes.
"""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from typing_extensions import override

from armature.models.adapters import is_adapter
from armature.models.loss import mean_cross_entropy
from armature.models.plan import Plan
from armature.models.timm import package
from armature.models.wrapped import Match, WrappedModel, weights_on


class ImageClassifier(WrappedModel):
    """A model of timm with a head for `classes`.

    Args:
        pretrained: the folder whose config.json describes the model, and from which its weights are
            read.
        classes: outputs of the head (N).
        new_head: begin with a random head, whatever head the folder has.
        image_size, channels: of the folder's model; the check before launch takes them from there.
        label_smoothing: training only; share of the target spread evenly over all classes.

    Raises:
        ValueError: timm is missing, or has no such model.
    """

    modality = "images"
    unsupported_strategies: ClassVar[dict[str, str]] = {  # read from the source before launch
        "pipeline": "timm's forward needs all of the model's parts. Type strategy=fsdp"
    }

    def __init__(
        self,
        *,
        pretrained: str,
        classes: int,
        new_head: bool = True,
        image_size: int | None = None,
        channels: int | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(pretrained, _build(pretrained, classes))
        self.new_head, self.label_smoothing = new_head, label_smoothing
        heads = self.inner.pretrained_cfg.get("classifier") or ()
        self._heads = (heads,) if isinstance(heads, str) else tuple(heads)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits (B, N) of images (B, C, I, I), or their loss if targets (B,) are given."""
        outputs = self.inner(inputs)
        if isinstance(outputs, tuple):  # of a model with a second head, in training
            outputs = torch.stack(outputs).mean(dim=0)
        return outputs if targets is None else self.loss(outputs, targets)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of logits (B, N), in nats, over the targets (B,) that are
        not -100.
        """
        return mean_cross_entropy(
            outputs, targets, label_smoothing=self.label_smoothing if self.training else 0.0
        )

    @cached_property
    def plan(self) -> Plan | None:
        """The longest list of modules of one class is the blocks; None: there is none."""
        lists = {
            name: len(module)
            for name, module in self.inner.named_modules()
            if isinstance(module, nn.Sequential | nn.ModuleList)
            and len({type(each) for each in module}) == 1
        }
        blocks = max(lists, key=lambda name: lists[name], default=None)
        if blocks is None or lists[blocks] < 2:
            return None
        why = f"timm has no plan for {type(self.inner).__name__}. Type strategy=fsdp"
        return Plan(blocks=f"inner.{blocks}", no_tensor=why)

    @override
    def match(self, saved: Mapping[str, Any]) -> Match:
        own = {
            name: tuple(value.shape)
            for name, value in self.inner.state_dict(keep_vars=True).items()
            if not is_adapter(name)
        }
        return Match.of(own, saved)

    @override
    def whole_state(self) -> dict[str, Tensor]:
        files = Path(self.pretrained).glob("*.safetensors")
        return {name: value for file in files for name, value in load_file(file).items()}

    @override
    def is_head(self, name: str) -> bool:
        return name.rpartition(".")[0] in self._heads


def _build(pretrained: str, classes: int) -> nn.Module:
    timm = package.load()
    config = json.loads((Path(pretrained) / "config.json").read_text(encoding="utf-8"))
    architecture, args = (
        config.get("architecture"),
        {**config.get("model_args", {}), "num_classes": classes},
    )
    if not timm.is_model(architecture):
        raise ValueError(
            f"model.pretrained={pretrained}: timm {timm.__version__} has no "
            f"architecture={architecture}. Install a newer version: code in a folder is never run"
        )
    try:
        with weights_on(torch.get_default_device()):
            return timm.create_model(architecture, pretrained=False, **args)
    except (TypeError, RuntimeError, AssertionError) as error:
        raise ValueError(
            f"model.pretrained={pretrained}: timm cannot build {architecture} ({error})"
        ) from error
