"""Users' code and sharded weights: `armature.whole_weights`, and what is right or an error without
it.
"""

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import armature
from armature.checkpoint import state
from armature.errors import ConfigError
from armature.parallel import gradients, mesh, sharded
from armature.parallel.whole_weights import whole
from tests.parallel.building import parallelize
from tests.support.parity.harness import on_ranks

pytestmark = pytest.mark.slow


def stack() -> Any:
    """Return two Linears, of which ranks shard the first, and an end that stays whole."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    if torch.distributed.is_initialized() and (ranks := torch.distributed.get_world_size()) > 1:
        sharded.guard()
        built = parallelize(model, axes={"shard": ranks}, plan=None, min_num_params=15)
        whole = [param for param in model.parameters() if not hasattr(param, "full_tensor")]
        assert len(whole) == 2
        gradients.AveragedGradients(mesh.data_group(built)).add(whole)
    return model


def part(x: torch.Tensor) -> torch.Tensor:
    if not torch.distributed.is_initialized():
        return x
    return x.chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()]


def changed() -> list[list[float]]:
    """Return the weights after changes that a shard cannot make, and gradients through a layer."""
    model = stack()
    torch.manual_seed(2)
    weight = model[0].weight
    nn.init.normal_(weight)
    trained, weight.data = weight.data, weight.data * 2  # as to evaluate averages
    weight.data = trained
    weight.data[1] = weight.data[3]
    with armature.whole_weights(model):
        first, last = model[0].weight, model[2].weight
        first.data[0, 0] = 2
        first.data[1].zero_()
        model[0].bias.data = torch.arange(5.0)
        last.data.copy_(torch.tensor(first.detach().numpy()[:2, :1]).expand(2, 5))
        torch.save(model.state_dict(), io.BytesIO())
    torch.manual_seed(1)
    x = torch.randn(8, 3)
    apart = model[2](model[0](part(x))) @ model[2].weight  # a layer, and a weight that is whole
    apart.square().mean().backward()
    with armature.whole_weights(model):
        model[0].weight.grad[2:4].zero_()
    weight.grad[[0]] = 0  # as for tokens that are not trained
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    columns = weight.norm(dim=0).sum()
    numbers = [*map(float, (norm, columns, weight.norm(), weight.abs().max()))]
    for foreach in (False, True):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=foreach)
        optimizer.add_param_group({"params": [], "lr": 0.5})
        with gradients.split_groups(optimizer):
            optimizer.step()
        assert [len(group["params"]) for group in optimizer.param_groups] == [4, 0]
    return [numbers, *(whole(p).detach().flatten().tolist() for p in model.parameters())]


@pytest.mark.guarantee
def test_whole_weights_are_changed_and_trained_as_in_one_process():
    (alone,), both = on_ranks(changed, ranks=1), on_ranks(changed, ranks=2)
    for found in both:
        for value, expected in zip(found, alone, strict=True):
            assert value == pytest.approx(expected, rel=1e-5, abs=1e-6)


def refused() -> list[str]:
    model, found = stack(), []
    weight = model[0].weight
    strategy = SimpleNamespace(lightning_module_state_dict=lambda: state.module_state(model))
    module: Any = SimpleNamespace(trainer=SimpleNamespace(strategy=strategy))
    whole = state.full_state_dict(module, prefix="0.")
    assert bool(whole) == (torch.distributed.get_rank() == 0)

    def assign() -> None:
        weight.data = torch.zeros(5, 3)

    def penalize() -> None:
        x = torch.ones(2, 3, requires_grad=True)
        torch.autograd.grad(model(x).sum(), x, create_graph=True)

    for action in (
        assign,
        penalize,
        lambda: weight * torch.ones(1),
        lambda: weight * torch.tensor(2.0),
        lambda: torch.save(model.state_dict(), io.BytesIO()),
        lambda: weight.data[0].zero_(),
    ):
        with pytest.raises((ConfigError, RuntimeError)) as error:
            action()
        found.append(str(error.value))
    with torch.no_grad():
        weight * torch.tensor(2.0)
    return found


def test_what_torch_does_wrongly_in_silence_is_an_error():
    for assigned, penalized, one_element, number, saved, row in on_ranks(refused, ranks=2):
        assert "Type weight[…] = value" in row
        assert "armature.whole_weights" in assigned
        assert "gradient of a gradient" in penalized
        assert sharded.MIXED in one_element
        assert sharded.MIXED in number
        assert saved.startswith(f"{__file__}:")
        assert "armature.full_state_dict" in saved
