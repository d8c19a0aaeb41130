"""Hooks that `weight.register_hook` has added: called once for each gradient, wherever a weight is
built.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from armature.parallel import dtensors, initialization
from benchmarks.parity.harness import on_ranks


def gradients(case: str) -> Any:
    """Return the mean of a sharded weight's gradient over that of a plain one, or of the steps, or
    facts of a copy.
    """
    import copy

    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from armature.parallel import copies, dtensors

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            if case == "tied":
                self.b.weight = self.a.weight
            self.a.weight.register_hook(lambda grad: grad * 0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    def gradient(model: nn.Module) -> torch.Tensor:
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        grad = model.get_parameter("a.weight").grad
        return grad.full_tensor() if hasattr(grad, "full_tensor") else grad  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess, reportReturnType]

    mesh = init_device_mesh("cpu", (2,))

    def shard(whole: nn.Module) -> None:
        fully_shard(whole, mesh=mesh)

    plain, model = gradient(Model()), Model()
    dtensors.support_user_code()
    dtensors.carry_hooks(model)
    shard(model)
    if case == "copied":
        copies.allow(model, shard)
        gradient(model)
        copied = copy.deepcopy(model)
        return [len(copied.a._forward_pre_hooks), (gradient(model) / plain).mean().item()]
    ratios = []
    for _ in range(3):
        if case == "inner":  # a part of the model is used past its forward
            with dtensors.gathers():
                model.a(torch.ones(2, 4)).sum().detach()
        ratios.append((gradient(model) / plain).mean().item())
    return ratios


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "expected"), [("tied", [1.0] * 3), ("inner", [1.0] * 3), ("copied", [0, 1.0])]
)
def test_a_hook_is_called_once_for_a_gathered_weight(case: str, expected: list[float]) -> None:
    for found in on_ranks(gradients, case, ranks=2):
        assert found == pytest.approx(expected)


def test_a_hook_of_a_weight_on_meta_is_called_once_it_is_built() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 3, bias=False)
    handle = model.weight.register_hook(lambda grad: grad * 0.5)
    initialization.materialize(model, device=torch.device("cpu"))
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad[0, 0] == 0.5
    handle.remove()
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad[0, 0] == 1.0


def test_attributes_of_weights_are_carried_to_those_that_take_their_place():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    vars(model[0].bias)["_no_weight_decay"] = True
    before = [*model.named_parameters()]
    model[0].bias = nn.Parameter(torch.zeros(2))
    dtensors.carry_attributes(before, model)
    assert [
        name for name, param in model.named_parameters() if hasattr(param, "_no_weight_decay")
    ] == ["0.bias"]
