import copy

import pytest
import torch

from armature.optim import muon
from armature.optim.muon import Muon, orthogonalize
from armature.parallel.distributed_matrices import DistributedMatrices
from tests.support.parity.harness import on_ranks


@pytest.mark.parametrize("shape", [(16, 16), (16, 64), (64, 16)])
def test_orthogonalize_pushes_singular_values_towards_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrix).float())
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_other_groups_follow_adamw():
    torch.manual_seed(0)
    ours, theirs = torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(4, 4))
    options = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    pairs = [
        (ours, Muon([{"params": [ours], "hidden": False}], **options)),
        (theirs, torch.optim.AdamW([theirs], **options)),
    ]
    for _ in range(5):
        gradient = torch.randn(4, 4)
        for param, optimizer in pairs:
            param.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_state_is_plain_and_resumes_exactly():
    def run(steps: range, params, optimizer):
        for step in steps:
            for i, param in enumerate(params):
                param.grad = torch.randn(
                    param.shape, generator=torch.Generator().manual_seed(10 * step + i)
                )
            optimizer.step()

    def make(values):
        params = [torch.nn.Parameter(value.clone()) for value in values]
        return params, Muon(
            [{"params": [params[0]], "hidden": True}, {"params": [params[1]], "hidden": False}],
            lr=0.1,
        )

    start = [torch.ones(8, 8), torch.ones(8)]
    params, optimizer = make(start)
    run(range(3), params, optimizer)
    resumed, resumed_optimizer = make(params)
    resumed_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for pair in ((params, optimizer), (resumed, resumed_optimizer)):
        run(range(3, 6), *pair)
    assert all(torch.equal(a, b) for a, b in zip(params, resumed, strict=True))


def test_a_step_of_a_stack_is_that_of_its_matrices():
    def stepped(params: list[torch.nn.Parameter], grads: list[torch.Tensor]) -> torch.Tensor:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        Muon([{"params": params, "hidden": True}], lr=1.0).step()
        return torch.stack([param.detach() for param in params])

    grad = torch.randn(5, 8, 16, generator=torch.Generator().manual_seed(0))
    together = stepped([torch.nn.Parameter(torch.ones(5, 8, 16))], [grad])[0]
    alone = stepped([torch.nn.Parameter(torch.ones(8, 16)) for _ in grad], [*grad])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


def train(layout: str) -> list[list]:
    """Return the weights after three steps, and the number of matrices that this rank
    orthogonalized per step.

    Every rank sees the same batch, which is large enough for gradients of full rank. The iteration
    multiplies the smallest singular values by hundreds, and rounding errors with them, so gradients
    are computed in float64.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    sizes = (
        (16, 24),
        (24, 24),
        (24, 24),
        (24, 24),
        (24, 13),
    )  # more matrices of one shape than ranks, and no multiple
    layers = [torch.nn.Linear(*size, bias=size[0] == 16) for size in sizes]
    model = torch.nn.Sequential(
        *(module for layer in layers for module in (layer, torch.nn.GELU()))
    ).double()
    if layout == "fsdp × tensor":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        plan = {
            str(i): ColwiseParallel() if i % 4 == 0 else RowwiseParallel() for i in range(0, 8, 2)
        }
        parallelize_module(model, mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["shard"])
    elif layout == "tensor":
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    elif layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    elif layout == "hsdp":
        fully_shard(
            model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        )
    hidden = [layer.weight for layer in layers]
    optimizer = Muon(
        [{"params": hidden, "hidden": True}, {"params": [model[0].bias], "hidden": False}], lr=0.1
    )
    counted = []
    if layout != "alone":
        optimizer.matrix_work = DistributedMatrices(
            torch.distributed.group.WORLD if layout == "ddp" else None
        )
        work = muon.orthogonalize
        muon.orthogonalize = lambda matrix, **kwargs: (
            counted.append(matrix.shape) or work(matrix, **kwargs)
        )
    for step in range(3):
        inputs = torch.randn(
            64, 16, generator=torch.Generator().manual_seed(step), dtype=torch.float64
        )
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    weights = [
        getattr(param, "full_tensor", lambda param=param: param)().tolist()
        for param in model.parameters()
    ]
    return [*weights, len(counted) // 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ranks", "most"),
    [
        ("ddp", 2, 4),
        ("ddp", 4, 3),
        ("fsdp", 2, 4),
        ("fsdp", 4, 3),
        ("hsdp", 4, 4),
        ("tensor", 2, 5),
        ("fsdp × tensor", 4, 5),
    ],
)
def test_shared_work_takes_the_same_steps_as_one_process(layout, ranks, most):
    expected = train("alone")
    for *weights, count in on_ranks(train, layout, ranks=ranks):
        assert count <= most, (
            "a rank should orthogonalize only its share of the five matrices per step"
        )
        for got, alone in zip(weights, expected, strict=False):
            torch.testing.assert_close(torch.tensor(got), torch.tensor(alone), rtol=1e-5, atol=1e-6)
