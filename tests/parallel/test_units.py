"""What is sharded, which of it is gathered together, and for how long."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

from armature.models.plan import Plan
from armature.parallel import initialization, units
from tests.parallel.building import decoder_on_meta, parallelize
from tests.support.parity.harness import DECODER, on_ranks


class Stack(nn.Module):
    """Blocks of 100 parameters each, and an end of 10."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.end = nn.Linear(10, 1, bias=False)
        self.blocks = nn.ModuleDict({str(i): nn.Linear(10, 10, bias=False) for i in range(blocks)})


@pytest.mark.parametrize(
    ("blocks", "at_least", "sizes"),
    [
        (4, 100, [1, 1, 1, 1]),
        (4, 101, [2, 2]),
        (5, 200, [2, 3]),
        (3, 200, [3]),
        (2, 150, [2]),
        (11, 300, [3, 3, 5]),
        (7, 700, [7]),
        (7, 701, []),
        (1, 100, [1]),
    ],
)
def test_consecutive_blocks_share_a_unit(blocks, at_least, sizes):
    model = Stack(blocks)
    found = units.find(model, Plan(), min_num_params=at_least).modules
    assert [len(unit) for unit in found] == sizes
    if sizes:
        assert [block for unit in found for block in unit] == list(model.blocks.children())


def test_an_end_is_a_unit_with_the_layers_in_it():
    model = Stack(2)
    model.end = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 1))  # pyright: ignore[reportAttributeAccessIssue]
    found = units.find(model, Plan(first=("end",)), min_num_params=100).modules
    assert found == [[model.end], *([block] for block in model.blocks.children())]


class Net(nn.Module):
    """Without a plan: a list of blocks, a sequence, tied leaves, and layers by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 10), nn.Linear(10, 10)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(10, 10)) for _ in range(2))
        self.stages = nn.Sequential(nn.Conv1d(10, 10, 1), nn.ReLU(), nn.Conv1d(10, 2, 1))
        self.conv, self.large = nn.Conv1d(10, 10, 1), nn.Linear(10, 20)
        self.shared = nn.Linear(10, 10)
        self.layers[1][0].bias = self.shared.bias
        self.hooked = nn.Linear(10, 10, bias=False)
        self.hooked.weight.register_hook(lambda grad: grad)
        self.bounded = nn.Embedding(10, 10, max_norm=1.0)


def test_blocks_and_large_leaves_are_units_without_a_plan():
    model = Net()
    found = units.find(model, None, min_num_params=50)
    names = {module: name for name, module in model.named_modules()}
    paths = {param: name for name, param in model.named_parameters()}
    assert [[names[module] for module in unit] for unit in found.modules] == [
        ["layers.0"], ["layers.1"], ["stages.0"], ["large"], ["shared"],
    ]  # fmt: skip
    assert {paths[param] for param in found.of_model} == {"embed.weight"}
    assert {paths[param] for param in found.whole} == {
        "head.bias", "layers.1.0.bias", "stages.2.weight", "stages.2.bias", "conv.weight",
        "conv.bias", "hooked.weight", "bounded.weight",
    }  # fmt: skip
    assert units.find(model, None, min_num_params=10**6).modules == []
    # whose Linear is never called
    assert units.find(nn.MultiheadAttention(8, 2), None, min_num_params=50).modules == []
    assert units.find(model.shared, None, min_num_params=50, listed=True).modules


def evaluated_twice(min_num_params: int, tied: bool) -> list[float]:
    """Return the losses of two evaluations. The weights are halved after each of them, and all
    units are resharded, as they are after training.
    """
    from torch.distributed.tensor import DTensor

    model = decoder_on_meta(**DECODER, tied=tied)
    parallelize(
        model, axes={"shard": torch.distributed.get_world_size()}, min_num_params=min_num_params
    )

    def shards() -> set[str]:
        return {name for name, p in model.named_parameters() if isinstance(p, DTensor)}

    sharded = shards()
    tokens = torch.arange(16)[None] % DECODER["vocab_size"]
    model(tokens, tokens).backward()
    assert shards() == sharded
    losses = []
    for _ in range(2):
        with torch.no_grad():
            losses.append(float(model(tokens, tokens)))
            for param in model.parameters():
                param.mul_(0.5)
    assert shards() == sharded
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_weights_that_change_after_an_evaluation_are_gathered_again(tied):
    sizes = (10**9, 0, 10_000)
    whole, *found = (on_ranks(evaluated_twice, size, tied, ranks=2)[0] for size in sizes)
    for losses in found:
        assert losses[0] != losses[1]
        assert losses == pytest.approx(whole, rel=1e-6)


def built(kept: list[Any]) -> None:
    model = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))])
    # garbage, such as the frame of a constructor, keeps no weight
    garbage = [model[0][0].weight]
    garbage.append(garbage)
    del garbage
    gc.freeze()
    kept.append(lambda weight=model[0][1].weight: weight)
    parallelize(model[0], axes={"shard": 2}, plan=None, prefix="net.", listed=True)


def divided(kept: list[Any]) -> None:
    model = decoder_on_meta(**DECODER)
    kept.append(lambda weight=model.blocks["0"].ffn.up.weight: weight)
    parallelize(model, axes={"tensor": 2}, prefix="net.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "name"), [(built, r"net\.1\.weight"), (divided, r"net\.blocks\.0\.ffn\.up\.weight")]
)
def test_a_weight_that_something_keeps_beside_the_module_is_named(build, name):
    with pytest.raises(RuntimeError, match=f"{name}: an attribute, closure or callback"):
        on_ranks(build, [], ranks=2)


def test_a_hook_of_a_weight_on_meta_is_called_once_it_is_built():
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
