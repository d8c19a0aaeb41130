"""Low-rank adapters (LoRA, arXiv:2106.09685): a frozen matrix W learns W + scale · B A, whose rank
is small.

An adapter is part of its Linear, whose weight keeps its name: plans, checkpoints and every strategy
see the same model with a few more parameters per Linear. The frozen weights may be held in 4 bits
(QLoRA, arXiv:2305.14314; `nf4.py`).
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from armature.errors import ConfigError
from armature.finetune import nf4
from armature.models.adapters import is_adapter


class LoraLinear(nn.Linear):
    """A Linear with an adapter: x (…, in) to W x + b + scale · B A x (…, out).

    A is (rank, in) and random, B (out, rank) and zero at first, so training begins with the
    Linear's own output.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    active: bool = True  # False: the Linear's own output (`without_adapters`)

    def __init__(self, base: nn.Linear, *, rank: int, scale: float, dropout: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        for name, param in base._parameters.items():
            self.register_parameter(name, param)
        self.scale, self.dropout = scale, dropout
        new = partial(torch.empty, dtype=torch.float32, device=next(base.parameters()).device)
        self.lora_A = nn.Parameter(new(rank, base.in_features))
        self.lora_B = nn.Parameter(new(base.out_features, rank))
        if not self.lora_A.is_meta:
            for name in ("lora_A", "lora_B"):
                initialize(name, getattr(self, name), None)

    @override
    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        if not self.active:
            return output
        dropped = F.dropout(input, self.dropout, self.training)
        # fp32 adapters of 16-bit weights compute in the weights' type, as autocast does anyway
        a, b = (adapter.to(input.dtype) for adapter in (self.lora_A, self.lora_B))
        return output + self.scale * F.linear(F.linear(dropped, a), b)


class LoraNf4Linear(LoraLinear, nf4.Nf4Linear):
    """A Linear of 4 bits with an adapter."""


class Lora:
    """Adds adapters to a model and freezes the rest.

    Args:
        rank: of the adapters.
        alpha: the adapter's output is multiplied by alpha / rank; with `rslora` by alpha /
            sqrt(rank) (arXiv:2312.03732), which keeps its size for any rank.
        dropout: of the adapter's input.
        targets: patterns of the Linears that get an adapter: their whole names, or the last part
            ("q", "blocks.0.*"); None: every Linear inside the model's blocks.
        train: patterns of other parameters, or modules, that are trained as a whole ("embed",
            "*_norm.weight").
        quantize: nf4 holds the frozen Linears inside the model's blocks in 4 bits, whether they
            have an adapter or not.
    """

    def __init__(
        self, *, rank: int = 16, alpha: float = 32.0, dropout: float = 0.0, rslora: bool = False,
        targets: Sequence[str] | None = None, train: Sequence[str] | None = None,
        quantize: str | None = None,
    ) -> None:  # fmt: skip
        self.quantize = quantize
        self.rank, self.alpha, self.dropout, self.rslora = rank, float(alpha), dropout, rslora
        self.targets, self.train = None if targets is None else list(targets), list(train or ())

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def add_to(self, model: nn.Module) -> None:
        """Freeze all but adapters and what `train` names.

        Raises ConfigError for a pattern without a match.
        """
        linears = {
            name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
        }
        # last parts of names of weights on which adapters would do nothing and 4 bits would fail
        read_directly = getattr(model, "read_directly", ())
        past = {name for name in linears if name.rpartition(".")[2] in read_directly}
        targets = self._chosen(model, linears, past)
        extra = self._trained(model)
        named = [*model.named_parameters(remove_duplicate=False)]
        times = Counter(id(param) for _, param in named)
        if odd := [
            name
            for name in targets
            if type(linears[name]) is not nn.Linear or times[id(linears[name].weight)] > 1
        ]:
            raise ConfigError(
                f"task.adapter.targets: {_kinds(odd)} takes no adapter: it is no plain "
                "torch.nn.Linear with a weight of its own. Leave it out of "
                f"task.adapter.targets, or train it as a whole: task.adapter.train=[{odd[0]}]."
            )
        if self.quantize is not None:
            inside = {name: linears[name] for name in _inside(linears) if name not in past}
            linears |= self._in_4_bits(inside, extra)
        model.requires_grad_(False)
        for name, param in named:
            if name in extra:
                param.requires_grad_(True)
        for name in targets:
            kind = LoraNf4Linear if isinstance(linears[name], nf4.Nf4Linear) else LoraLinear
            linears[name] = kind(
                linears[name], rank=self.rank, scale=self.scale, dropout=self.dropout
            )
        for name, module in linears.items():
            if isinstance(module, LoraLinear | nf4.Nf4Linear):
                model.set_submodule(name, module)
        if any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules()):
            # it reads weights past the Linears' forward
            torch.backends.mha.set_fastpath_enabled(False)
        if (own := getattr(model, "initialize_parameter", None)) is not None:
            model.initialize_parameter = partial(_initialize, own)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]

    def _chosen(self, model: nn.Module, linears: dict[str, nn.Linear], past: set[str]) -> list[str]:
        if self.targets is None:
            if not (chosen := [name for name in _inside(linears) if name not in past]):
                raise ConfigError("task.adapter: the model has no torch.nn.Linear to adapt.")
            own = dict(model.named_parameters())  # without a head's that is tied
            if not _is_repeated(chosen[0]) and any(map(_is_repeated, own)):
                outside = ", ".join(name for name in chosen if f"{name}.weight" in own)
                raise ConfigError(
                    "task.adapter.targets=null: adapters are for every torch.nn.Linear inside the "
                    "model's blocks, and these have none. Train the whole model, or name some of "
                    f"those outside in task.adapter.targets: {outside or 'there are none'}."
                )
            return chosen
        if missing := [
            each for each in self.targets if not any(_matches(name, each) for name in linears)
        ]:
            raise ConfigError(
                f"task.adapter.targets={self.targets}: no Linear matches {', '.join(missing)}. "
                "There are: "
                f"{_kinds(linears)}."
            )
        chosen = [name for name in linears if any(_matches(name, each) for each in self.targets)]
        if odd := [name for name in chosen if name in past]:
            raise ConfigError(
                f"task.adapter.targets={self.targets}: the weights of {_kinds(odd)} are read past "
                "their Linears, so that an adapter would do nothing. Leave them out."
            )
        return chosen

    def _in_4_bits(self, linears: dict[str, nn.Linear], trained: set[str]) -> dict[str, nn.Linear]:
        """Return these Linears in 4 bits, without those whose weight is trained as a whole."""
        chosen = {
            name: linear for name, linear in linears.items() if f"{name}.weight" not in trained
        }
        if odd := [
            f"{name} ({linear.in_features})"
            for name, linear in chosen.items()
            if not nf4.fits(linear)
        ]:
            raise ConfigError(
                f"task.adapter.quantize={self.quantize} holds rows in blocks of {nf4.BLOCK} "
                "elements, which do not "
                f"divide those of {_kinds(odd)}. Type task.adapter.quantize=null."
            )
        return {name: nf4.Nf4Linear(linear) for name, linear in chosen.items()}

    def _trained(self, model: nn.Module) -> set[str]:
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        found: set[str] = set()
        for pattern in self.train:
            matching = {
                name
                for name in names
                if any(_matches(part, pattern) for part in _with_owners(name))
            }
            if not matching:
                raise ConfigError(
                    f"task.adapter.train={self.train}: no parameter matches {pattern}. There are: "
                    f"{_kinds(names)}."
                )
            found |= matching
        return found


def merge(model: nn.Module) -> nn.Module:
    """Add each adapter to its weight, and return the model with plain Linears.

    All parts must be whole.

    Weights of 4 bits become fp32, others are changed in place.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLinear | nf4.Nf4Linear):
            is_dense = not isinstance(module, nf4.Nf4Linear)
            weight = (
                module.weight if is_dense else nn.Parameter(module.dense(), requires_grad=False)
            )
            if isinstance(module, LoraLinear):
                change = module.lora_B.float() @ module.lora_A.float()
                with torch.no_grad():
                    weight.copy_(weight.float() + module.scale * change)
            plain = nn.Linear(
                module.in_features, module.out_features, bias=module.bias is not None, device="meta"
            )
            plain.weight, plain.bias = weight, module.bias
            model.set_submodule(name, plain)
    return model


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let a model compute what it would without its adapters, inside a `with` block."""
    adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for module in adapted:
        module.active = False
    try:
        yield
    finally:
        for module in adapted:
            module.active = True


def initialize(name: str, param: Tensor, generator: torch.Generator | None) -> None:
    """Fill one part of an adapter.

    A as torch fills a Linear's weight (and peft its A), the others with zeros.
    """
    with torch.no_grad():
        if name.endswith("lora_A"):
            nn.init.kaiming_uniform_(param, a=math.sqrt(5), generator=generator)
        else:
            param.zero_()


def _initialize(own: Any, name: str, param: Tensor, generator: torch.Generator) -> None:
    (initialize if is_adapter(name) else own)(name, param, generator)


def _with_owners(name: str) -> Iterator[str]:
    """Yield the name of a parameter, and of each module that holds it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _inside(linears: dict[str, nn.Linear]) -> list[str]:
    """Return the plain Linears inside the model's blocks; without such, all plain Linears."""
    plain = [name for name, module in linears.items() if type(module) is nn.Linear]
    return [name for name in plain if _is_repeated(name)] or plain


def _is_repeated(name: str) -> bool:
    """Return whether a module lies in a list or dict of blocks with numbers for names."""
    return any(part.isdigit() for part in name.split("."))


def _kinds(names: Any) -> str:
    """Return names with * in place of the blocks' numbers, each once."""
    kinds = dict.fromkeys(
        ".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names
    )
    return ", ".join(kinds) or "none"
