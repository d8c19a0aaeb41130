"""BatchNorm over two ranks against torch's own in one process with the whole batch."""

import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from armature.parallel import batchnorm
from tests.support.parity.harness import on_ranks


class Own(nn.BatchNorm2d):
    """A class of a user's, which calls torch's forward."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class CallsItself(nn.modules.batchnorm._BatchNorm):
    """As V-Net has it."""

    @torch.autocast("cpu", enabled=False)
    def forward(self, input: Tensor) -> Tensor:
        return self._normalized(input)

    def _normalized(self, input: Tensor) -> Tensor:
        mean, variance = self.running_mean, self.running_var
        return nn.functional.batch_norm(
            input, mean, variance, self.weight, self.bias, self.training, 0.2, self.eps
        )


class CallsTorchs(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return nn.BatchNorm1d.forward(self, input)


SHAPES = {
    nn.BatchNorm1d: (24, 6),
    nn.BatchNorm2d: (24, 6, 5, 4),
    nn.BatchNorm3d: (24, 6, 3, 2, 2),
    Own: (24, 6, 5, 4),
}
SHAPES |= {CallsItself: (24, 6, 5, 4), CallsTorchs: (24, 6)}
CASES = {
    "1d": (nn.BatchNorm1d, {}, 0.0, (12, 12)),
    "2d": (nn.BatchNorm2d, {}, 0.0, (12, 12)),
    "3d": (nn.BatchNorm3d, {}, 0.0, (12, 12)),
    "unequal": (nn.BatchNorm2d, {}, 3.0, (23, 1)),
    "a rank without samples": (nn.BatchNorm2d, {}, 3.0, (24, 0)),
    "mean 1000": (nn.BatchNorm2d, {}, 1000.0, (14, 10)),
    "momentum=None": (nn.BatchNorm1d, {"momentum": None}, 0.0, (12, 12)),
    "affine=False": (nn.BatchNorm2d, {"affine": False}, 0.0, (12, 12)),
    "bias=False": (nn.BatchNorm2d, {"bias": False}, 0.0, (12, 12)),
    "untracked": (nn.BatchNorm2d, {"track_running_stats": False}, 0.0, (12, 12)),
    "own forward": (Own, {}, 0.0, (12, 12)),
    "own call of batch_norm": (CallsItself, {}, 0.0, (23, 1)),
    "own call of torch's forward": (CallsTorchs, {}, 0.0, (12, 12)),
}
PENALIZED = ("1d", "2d", "unequal", "affine=False", "own call of torch's forward")


def outcome(
    case: str, parts: tuple[int, ...], rank: int, *, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Run three batches forward and backward on one rank's part of each, and the last one in
    evaluation.
    """
    cls, arguments, mean, _ = CASES[case]
    generator = torch.Generator().manual_seed(1)
    module = cls(6, **arguments)
    if module.weight is not None:
        nn.init.uniform_(module.weight, 0.5, 1.5, generator=generator)
    module = module.to(dtype)
    if len(parts) > 1:
        batchnorm.synchronize(module, group=torch.distributed.group.WORLD)
        assert isinstance(module, cls)
    ends = [sum(parts[:i]) for i in range(len(parts) + 1)]
    part = slice(*list(pairwise(ends))[rank])
    results: dict[str, Any] = {"y": [], "dx": []}
    for _ in range(3):
        x = (torch.randn(SHAPES[cls], generator=generator) + mean).to(dtype)[part].requires_grad_()
        slope = torch.randn(SHAPES[cls], generator=generator).to(dtype)[part]
        y = module(x)
        (y * slope).sum().backward()
        results["y"].append(y.detach())
        results["dx"].append(x.grad)
    results["eval"] = module.eval()(x.detach()).detach()
    results["gradients"] = [param.grad for param in module.parameters()]
    results["running"] = [buffer.clone() for buffer in module.buffers()]
    return results


def penalized(case: str, parts: tuple[int, ...], rank: int) -> list[Tensor]:
    """Return the gradients of a penalty on gradients on one rank's part of a batch."""
    cls, arguments, mean, _ = CASES[case]
    generator = torch.Generator().manual_seed(2)
    module = cls(6, **arguments).double()
    last = torch.randn(SHAPES[cls][1:], generator=generator).double()
    if len(parts) > 1:
        batchnorm.synchronize(module, group=torch.distributed.group.WORLD)
    part = slice(*list(pairwise([sum(parts[:i]) for i in range(len(parts) + 1)]))[rank])
    x = (torch.randn(SHAPES[cls], generator=generator) + mean).double()[part].requires_grad_()
    score = (module(x.square()).tanh() * last).sum()
    (gradient,) = torch.autograd.grad(score, x, create_graph=True)
    gradient.square().sum().backward()
    return [x.grad, *(param.grad for param in module.parameters() if param.grad is not None)]  # pyright: ignore[reportReturnType]


def _on_rank(case: str) -> dict[str, Any]:
    return outcome(case, CASES[case][3], torch.distributed.get_rank())


def _all_on_rank() -> bytes:
    twice = {
        case: penalized(case, CASES[case][3], torch.distributed.get_rank()) for case in PENALIZED
    }
    return pickle.dumps(
        ({case: _on_rank(case) for case in CASES}, twice)
    )  # tensors would be shared memory of an ended process


@pytest.mark.slow
def test_two_ranks_compute_what_one_process_does():
    both = [pickle.loads(of_rank) for of_rank in on_ranks(_all_on_rank, ranks=2)]
    for case, (_, _, mean, parts) in CASES.items():
        alone = outcome(case, (sum(parts),), 0, dtype=torch.float64)
        ranks = [of_rank[case] for of_rank, _ in both]
        joined = {
            key: [torch.cat(pair) for pair in zip(ranks[0][key], ranks[1][key], strict=True)]
            for key in ("y", "dx")
        }
        joined["eval"] = torch.cat([ranks[0]["eval"], ranks[1]["eval"]])
        joined["gradients"] = [
            a + b for a, b in zip(ranks[0]["gradients"], ranks[1]["gradients"], strict=True)
        ]
        for key, value in joined.items():
            atol = (
                5e-4 if key == "eval" and mean > 100 else 1e-5
            )  # torch's own evaluation rounds the mean
            torch.testing.assert_close(
                value, alone[key], atol=atol, rtol=1e-5, check_dtype=False,
                msg=lambda text, at=(case, key): f"{at}: {text}",
            )  # fmt: skip
        for of_rank in ranks:
            torch.testing.assert_close(
                of_rank["running"], alone["running"], atol=1e-8, rtol=1e-6, check_dtype=False
            )
    for case in PENALIZED:
        parts = CASES[case][3]
        alone, ((x0, *first), (x1, *second)) = (
            penalized(case, (sum(parts),), 0),
            (twice[case] for _, twice in both),
        )
        found = [torch.cat([x0, x1]), *(a + b for a, b in zip(first, second, strict=True))]
        torch.testing.assert_close(found, alone, msg=lambda text, at=case: f"{at}: {text}")
