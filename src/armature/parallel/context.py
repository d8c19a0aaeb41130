"""The context axis: ranks share samples, and each computes its part of the positions.

Only attention looks at other positions, and there are two ways to show them to it. By all-to-all
(Ulysses, arXiv:2309.14509) each rank gets all positions of some of the heads, and its own positions
of all heads back. By all-gather (Llama 3, arXiv:2407.21783, 3.3.2) each rank gets the keys and
values of all positions for its own queries: there may be more ranks than heads, but each holds all
keys.

A causal position attends to all before it, so late ones are more work. Each rank has two pieces of
the positions, one counted from the start and one from the end (head and tail), which together are
as much work on every rank.

What surrounds the model keeps its meaning: whole samples go in, and the loss over all targets, or
the outputs of all positions, come out, the same on all ranks of the axis.

Shapes: B batch, T positions of a sample, H query heads, G key-value heads, K head width, C ranks of
the axis. H and G are those of one rank of the tensor axis.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from armature.errors import ConfigError
from armature.models.loss import IGNORED
from armature.models.plan import Plan
from armature.parallel.experts import exchange
from armature.parallel.functional import Ranks
from armature.parallel.mesh import gathers_keys
from armature.parallel.targets import weigh
from armature.parallel.tensor import styles_of


class Positions:
    """This rank's part of the positions, and the exchanges with the other ranks of the axis.

    Args:
        method: "all_to_all", "all_gather", or "auto": all-to-all while there are enough heads.
    """

    def __init__(self, group: dist.ProcessGroup, *, method: str = "auto") -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.method = method
        self.ranks = Ranks.of(group)
        # of models that are running, innermost last
        self._shares: list[Tensor | None] = []

    def part(self, x: Tensor) -> Tensor:
        """Return this rank's positions (dim 1) of x: (B, T, …) to (B, T / C, …)."""
        if x.ndim < 2 or x.shape[1] % (2 * self.size):
            raise ConfigError(
                f"2 × strategy.context={self.size} does not divide the "
                f"{x.shape[1] if x.ndim > 1 else 1} positions (dim 1) "
                f"of a batch of shape {tuple(x.shape)}. Type another length, or strategy.context=1."
            )
        return self._part_of(x, self.rank, dim=1)

    def _part_of(self, x: Tensor, rank: int, *, dim: int) -> Tensor:
        pieces = x.chunk(2 * self.size, dim)
        return torch.cat([pieces[rank], pieces[-1 - rank]], dim)

    def _whole(self, parts: Iterable[Tensor], *, dim: int) -> Tensor:
        """Return all ranks' parts along `dim` as one, in the order of positions."""
        heads, tails = zip(*(part.chunk(2, dim) for part in parts), strict=True)
        return torch.cat([*heads, *reversed(tails)], dim)

    def whole(self, x: Tensor) -> Tensor:
        """Return all positions of outputs: (B, T / C, …) to (B, T, …).

        All ranks must use them alike.
        """
        parts = self.ranks.to_averaged(self.ranks.to_all(x, 0)).chunk(self.size)
        return self._whole(parts, dim=1)

    def share(self, targets: Tensor) -> Tensor | None:
        """Return the factor of this rank's mean loss (see `weigh`): the mean over ranks is that
        over all targets.

        Args:
            targets: of all positions. None is returned if they are no classes: then the parts count
                alike.
        """
        if targets.is_floating_point():
            return None
        counted = targets != IGNORED
        return (
            self.part(counted).sum(dtype=torch.float32)
            * self.size
            / counted.sum(dtype=torch.float32).clamp(min=1)
        )

    def mean(self, loss: Tensor) -> Tensor:
        """Return the mean over the ranks.

        Gradients pass as they are: sharding averages them over these ranks, too.
        """
        total = self.ranks.to_sum(loss.float())  # the default type may be bf16
        # divided last: FSDP2 warns of a module that returns a view
        return self.ranks.to_averaged(total) / self.size

    # ------------------------------------------------------------ attention
    def around(self, attend: Callable[..., Tensor], *, style: str) -> Callable[..., Tensor]:
        """Return attention of this rank's positions: (B, heads, T / C, K) of queries, keys and
        values to (B, H, T / C, K).

        `style` is one of `CONTEXT_STYLES`. Only a causal one takes the queries of some positions.
        """

        def forward(
            q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, *others: Any, **named: Any
        ) -> Tensor:
            # autocast normalizes them in fp32
            q_BHTK, k_BGTK = (q_BHTK.to(v_BGTK.dtype), k_BGTK.to(v_BGTK.dtype))
            if style == "causal" and gathers_keys(self.method, q_BHTK.shape[1], self.size):
                results = [
                    attend(*piece, *others, **named)
                    for piece in self._with_all_keys(q_BHTK, k_BGTK, v_BGTK)
                ]
                return torch.cat(results, 2)
            heads = self._to_heads(q_BHTK, k_BGTK, v_BGTK)
            return self._to_positions(attend(*heads, *others, **named))

        return forward

    def _with_all_keys(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield each piece of this rank's queries, with the keys and values up to its end."""
        gathered = self.ranks.to_whole(torch.stack([k, v]), 0).chunk(self.size)
        k, v = self._whole(gathered, dim=3)
        ends = (self.rank + 1, 2 * self.size - self.rank)
        for q_piece, end in zip(q.chunk(2, 2), ends, strict=True):
            seen = end * q_piece.shape[2]
            yield q_piece, k[:, :, :seen], v[:, :, :seen]

    def _to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Iterator[Tensor]:
        """Exchange queries, keys and values at once: (B, H, T / C, K) to (B, H / C, T, K)."""
        # fewer heads than ranks
        if (copies := self.size // math.gcd(self.size, k.shape[1])) > 1:
            k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
        if q.shape[1] % self.size:
            raise ConfigError(
                f"strategy.context={self.size} does not divide the {q.shape[1]} heads of this "
                "rank's attention. Type a number that does."
            )
        parts = [x.chunk(self.size, 1) for x in (q, k, v)]
        # (C, B, heads, T / C, K)
        sent = torch.stack([torch.cat(of_rank, 1) for of_rank in zip(*parts, strict=True)])
        received = exchange(sent, self.group).split([of_all[0].shape[1] for of_all in parts], 2)
        # each its own copy: what attention keeps of one must not keep the memory of all three
        return (self._whole(x, dim=2) for x in received)

    def _to_positions(self, out_BHTK: Tensor) -> Tensor:
        """Exchange attention's results: (B, H / C, T, K) to (B, H, T / C, K)."""
        parts = [self._part_of(out_BHTK, rank, dim=2) for rank in range(self.size)]
        return exchange(torch.stack(parts), self.group).movedim(0, 1).flatten(1, 2)

    # ------------------------------------------------------------ models
    def divide(self, model: nn.Module, plan: Plan) -> None:
        """Let modules work on this rank's positions, and attention see all of them.

        Calls of the model with whole samples return losses of all targets, or outputs of all
        positions. Those of a pipeline's stages, which share no hooks with it, do not.
        """
        for name, style in styles_of(model, plan.context).items():
            module = model.get_submodule(name)
            if style == "part":
                module.register_forward_pre_hook(lambda _, args: (self.part(args[0]), *args[1:]))
            else:
                module.forward = self.around(module.forward, style=style)
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, with_kwargs=True, always_call=True)

    def _begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        targets = args[1] if len(args) > 1 else kwargs.get("targets")
        share = None if targets is None else self.share(targets)
        if len(args) > 1 and targets is not None:
            args = (args[0], self.part(targets), *args[2:])
        elif targets is not None:
            kwargs = {**kwargs, "targets": self.part(targets)}
        self._shares.append(share)
        return args, kwargs

    def _end(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        share = self._shares.pop()
        if output is None:  # it raised an error
            return None
        if not isinstance(output, Tensor):
            raise TypeError(
                f"strategy.context={self.size}: {type(model).__name__}.forward must return a loss, "
                f"or outputs (B, T, …) as one tensor. Got {type(output).__name__}."
            )
        if output.ndim:
            return self.whole(output)
        return self.mean(weigh(output, share))
