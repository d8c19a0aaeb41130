"""Models that another library builds and computes, with the weights of a folder.

The weights are not read here: a strategy does so, as for `armature.models.decoder.model.Decoder`.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from typing_extensions import override

from armature.models.adapters import is_adapter
from armature.models.plan import by_rows


@dataclass(frozen=True)
class Match:
    """How the tensors of a folder fit a model.

    Attributes:
        missing: the model's names (in `inner`) that the folder lacks.
        surplus: the folder's names that the model lacks.
        wrong: the shapes there and here of what has another shape, by the model's names.
    """

    missing: Collection[str]
    surplus: list[str]
    wrong: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]

    @classmethod
    def of(cls, own: Mapping[str, tuple[int, ...]], saved: Mapping[str, Any]) -> "Match":
        """Return how tensors that are `saved`, each with its `shape`, fit a model's own shapes."""
        wrong = {
            name: (there, shape)
            for name, shape in own.items()
            if name in saved and (there := tuple(saved[name].shape)) != shape
        }
        return cls(own.keys() - saved, sorted(saved.keys() - own), wrong)


class WrappedModel(nn.Module):
    """A model of another library, without its weights.

    Args:
        pretrained: the folder from which its weights are read.
        inner: the model, which `weights_on` has built.

    Attributes:
        new_head: begin with a random head, whatever head the folder has.
    """

    new_head = False

    def __init__(self, pretrained: str, inner: Any) -> None:
        super().__init__()
        self.pretrained, self.inner = pretrained, inner

    @override
    def _apply(self, fn: Any, recurse: bool = True) -> "WrappedModel":
        """Keep the type of computed tables, as of rotary frequencies, which 16 bits would round."""
        kept = [
            (module, name, buffer)
            for module in self.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name in module._non_persistent_buffers_set and buffer.is_floating_point()
        ]
        super()._apply(fn, recurse)
        for module, name, before in kept:
            now = module.get_buffer(name)
            if now.dtype != before.dtype:
                setattr(module, name, before.to(now.device))
        return self

    def match(self, saved: Mapping[str, Any]) -> Match:
        """Return how the folder fits the model; `saved` are its tensors, each with its `shape`."""
        raise NotImplementedError

    def whole_state(self) -> dict[str, Tensor]:
        """Return all weights of the folder on the CPU, by the names in `inner`."""
        raise NotImplementedError

    def names_in(self, saved: Mapping[str, Any]) -> set[str]:
        """Return the parameters and buffers that the folder gives, whose tensors are `saved`.

        Raises ValueError if it lacks one, other than the parts that `may_be_new`.
        """
        missing = self.match(saved).missing
        if lacking := sorted(name for name in missing if not self.may_be_new(name)):
            raise ValueError(
                f"{self.pretrained}: its files lack {lacking[0]}, and {len(lacking) - 1} more"
            )
        own = (name for name in self.inner.state_dict(keep_vars=True) if not is_adapter(name))
        return {
            f"inner.{name}" for name in own if name not in missing and not self.begins_anew(name)
        }

    def is_head(self, name: str) -> bool:
        """Return whether a parameter (by its name in `inner`) tells classes apart."""
        return False

    def may_be_new(self, name: str) -> bool:
        """Return whether a folder may lack a parameter (by its name in `inner`), which then begins
        at random.
        """
        return self.is_head(name)

    def may_be_left(self, name: str) -> bool:
        """Return whether a tensor of the folder, by its name there, may be without a use."""
        return self.is_head(name)

    def begins_anew(self, name: str) -> bool:
        """Return whether a parameter (by its name in `inner`) is not read, although the folder may
        have it.
        """
        return self.new_head and self.is_head(name)

    @property
    def deviation(self) -> float:
        """Standard deviation of matrices that begin at random."""
        return 0.02

    @by_rows
    def initialize_parameter(self, name: str, param: Tensor, generator: torch.Generator) -> None:
        """Fill a parameter that the folder lacks."""
        if param.ndim == 1:
            param.fill_(1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0)
        else:
            param.normal_(0.0, self.deviation, generator=generator)


def module_name(name: str) -> str:
    """Return the name of a parameter in the model of the library."""
    return name.removeprefix("inner.")


@contextmanager
def weights_on(device: torch.device) -> Iterator[None]:
    """Let modules that are built have their parameters on `device`, and their buffers, with values,
    on the CPU.

    Libraries compute tables, such as rotary frequencies, in constructors and keep them in buffers
    that no checkpoint
    holds: on the meta device they would be lost.
    """

    def move(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.device.type == device.type:
            return None
        return nn.Parameter(param.to(device), requires_grad=param.requires_grad)

    hook = register_module_parameter_registration_hook(move)  # pyright: ignore[reportArgumentType]
    try:
        with torch.device("cpu"):
            yield
    finally:
        hook.remove()
