"""A feed-forward of many experts, of which a router chooses a few for each token.

No token is dropped.

Rows (one per token and chosen expert) are sorted by expert and put back by permutations, so that
nothing is added up in an order that changes from run to run.

Shapes: B batch, T positions, D width, N tokens, E experts, A active experts per token, F their
hidden width, M = N * A rows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armature.models.autocast import to_compute_dtype
from armature.models.decoder.model import FeedForward
from armature.models.permutation import permute


class Experts(nn.Module):
    """SwiGLU (arXiv:2002.05202) of E experts on rows that are sorted by expert.

    Attributes:
        stacked: each parameter is a stack of matrices: Muon orthogonalizes each of them.
        used_share: of its parameters, the share that one token uses, by which pipeline stages are
            balanced.
    """

    stacked = True
    used_share = 1.0

    def __init__(self, width: int, *, experts: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, hidden, width))
        self.up = nn.Parameter(torch.empty(experts, hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))

    def forward(self, x_MD: Tensor, count_E: Tensor) -> Tensor:
        """Return each row's output (M, D); the first `count_E[0]` rows are the first expert's, and
        so on.
        """
        end_E = count_E.cumsum(0, dtype=torch.int32)
        h_MF = F.silu(grouped_product(x_MD, self.gate, end_E)) * grouped_product(
            x_MD, self.up, end_E
        )
        return grouped_product(h_MF, self.down, end_E)


def grouped_product(x_MI: Tensor, weight_EOI: Tensor, end_E: Tensor) -> Tensor:
    """Return (M, O): rows up to `end_E[e]`, from the expert before, times the transposed matrix of
    expert e.
    """
    # autocast does not know grouped_mm
    x_MI, weight_EOI = (to_compute_dtype(x_MI), to_compute_dtype(weight_EOI))
    if takes_groups(x_MI):
        if x_MI.device.type == "cuda" and torch.cuda.get_device_properties(x_MI.device).major >= 10:
            # Blackwell leaves garbage in the gradients of experts without rows (pytorch#172439),
            # which `where` drops
            rows_E = end_E.diff(prepend=end_E.new_zeros(1))
            weight_EOI = weight_EOI.where(rows_E[:, None, None] > 0, 0)
        return F.grouped_mm(x_MI, weight_EOI.mT, offs=end_E)
    rows = zip(x_MI.split(row_counts(x_MI, end_E)), weight_EOI, strict=True)
    return torch.cat([x_RI @ weight_OI.mT for x_RI, weight_OI in rows])


def row_counts(x_MI: Tensor, end_E: Tensor) -> list[int]:
    """Return the number of each expert's rows. Waits for the device."""
    return end_E.diff(prepend=end_E.new_zeros(1)).tolist()


def takes_groups(x: Tensor) -> bool:
    """Return whether torch's grouped product takes this type on this device: CUDA's bf16, from
    Ampere on.

    A CPU's takes fp32 too, but not while it is compiled (torch 2.13: the shapes' rule is CUDA's).
    """
    if x.device.type == "cuda":
        return x.dtype == torch.bfloat16 and torch.cuda.get_device_properties(x.device).major >= 8
    return x.dtype == torch.bfloat16 or (
        x.dtype == torch.float32 and not torch.compiler.is_compiling()
    )


class Router(nn.Linear):
    """Scores of all experts, always computed in fp32: choices depend on small differences of them.

    Attributes:
        full_precision: sharding gathers the weight in its own type, also where it gathers others in
            bf16.
    """

    full_precision = True

    def forward(self, x_BTD: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.autocast(x_BTD.device.type, enabled=False):
            return F.linear(x_BTD.float(), self.weight.float())


class Mixture(nn.Module):
    """`active` of `experts` for each token, and a shared expert for all of them if `shared_hidden`
    is given.

    A bias that affects the choice alone levels the experts' load (arXiv:2408.15664). `rebalance`
    moves it, once per optimizer step; with a `balance_rate` of 0 there is none. There is no
    auxiliary loss: over a micro-batch it would be no mean over samples.

    Attributes:
        newest_E: tokens of each expert in the newest forward if it trains, until `count_newest`
            takes them.
        passes: if it is a list, `count_newest` puts each pass's tokens there, and counts nothing.
    """

    bias: Tensor | None

    def __init__(
        self,
        width: int,
        *,
        experts: int,
        active: int,
        expert_hidden: int,
        shared_hidden: int | None,
        score: str,
        normalized: bool,
        balance_rate: float,
    ) -> None:
        super().__init__()
        self.active, self.score, self.normalized, self.balance_rate = (
            active,
            score,
            normalized,
            balance_rate,
        )
        self.router = Router(width, experts, bias=False)
        self.experts = Experts(width, experts=experts, hidden=expert_hidden)
        self.experts.used_share = active / experts
        self.shared = None if shared_hidden is None else FeedForward(width, hidden=shared_hidden)
        # a real tensor, also while parameters are on the meta device; fp32, also where the default
        # type is bf16
        self.register_buffer(
            "bias",
            torch.zeros(experts, dtype=torch.float32, device="cpu") if balance_rate else None,
        )
        self.newest_E: Tensor | None = None
        self.passes: list[Tensor] | None = None
        # since `take_counts`; a list would recompile compiled code as it grows
        self._count_E: Tensor | None = None

    def forward(self, x_BTD: Tensor) -> Tensor:
        logits_NE = self.router(x_BTD).flatten(0, 1)
        score_NE = logits_NE.sigmoid() if self.score == "sigmoid" else logits_NE.softmax(-1)
        preferred_NE = score_NE.detach() if self.bias is None else score_NE.detach() + self.bias
        chosen_NA = preferred_NE.topk(self.active, sorted=False).indices
        weight_NA = score_NE.gather(1, chosen_NA)
        if self.normalized:
            weight_NA = weight_NA / weight_NA.sum(1, keepdim=True)
        expert_M = chosen_NA.flatten()
        count_E = torch.zeros_like(score_NE[0], dtype=torch.int64).scatter_add_(
            0, expert_M, torch.ones_like(expert_M)
        )
        # None too: a recomputation leaves tokens here, which a pass in eval mode must not count
        self.newest_E = count_E if self.training and torch.is_grad_enabled() else None
        order_M = expert_M.argsort(stable=True)
        rows_MD = permute(x_BTD.flatten(0, 1).repeat_interleave(self.active, 0), order_M)
        y_MD = self.experts(rows_MD, count_E)
        # an expert axis's rows travel meanwhile
        shared_BTD = None if self.shared is None else self.shared(x_BTD)
        y_MD = permute(y_MD, order_M.argsort())
        y_ND = (y_MD.unflatten(0, (-1, self.active)) * weight_NA[..., None].to(y_MD.dtype)).sum(1)
        y_BTD = y_ND.view_as(x_BTD)
        return y_BTD if shared_BTD is None else y_BTD + shared_BTD

    def count_newest(self) -> None:
        """Count the tokens of the newest training forward.

        Called once per pass, and not when it is computed again.
        """
        newest_E, self.newest_E = self.newest_E, None
        if newest_E is not None and self.passes is not None:
            self.passes.append(newest_E)
        elif newest_E is not None:
            self.count(newest_E)

    def count(self, count_E: Tensor) -> None:
        """Count so many tokens of each expert."""
        self._count_E = count_E.clone() if self._count_E is None else self._count_E + count_E

    def take_counts(self) -> Tensor | None:
        """Return the tokens of each expert counted since the last call (E,), or None if there are
        none.
        """
        count_E, self._count_E = self._count_E, None
        return count_E

    @torch.no_grad()
    def rebalance(self, load_E: Tensor) -> None:
        """Raise the bias of experts with fewer tokens than the mean, and lower that of others.

        Its mean stays 0.

        A frozen router, as beside adapters, keeps its bias.
        """
        if self.bias is None or not self.router.weight.requires_grad:
            return
        # whole numbers: exact under every layout
        step_E = (load_E.sum() - len(load_E) * load_E).sign().to(self.bias)
        self.bias += self.balance_rate * (step_E - step_E.mean())

    def _apply(self, fn: Any, recurse: bool = True) -> "Mixture":
        bias = self.bias
        super()._apply(fn, recurse)
        if (
            bias is not None and self.bias is not None and self.bias.dtype != bias.dtype
        ):  # in 16 bits its steps would be rounded away
            self.bias = bias.to(self.bias.device)
        return self
