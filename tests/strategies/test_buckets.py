"""A DDP that is made in the order of another's buckets has these from its first step on."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from armature.strategies.buckets import Buckets


class Net(nn.Module):
    """Registered in another order than it is used in, with more than a megabyte of weights."""

    def __init__(self, *, unused: bool) -> None:
        super().__init__()
        self.head, self.first = nn.Linear(600, 1), nn.Linear(4, 600)
        self.scales = nn.Parameter(torch.ones(600))
        self.middle = nn.Linear(600, 600)
        if unused:
            self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.first(x)) * self.scales).sum()


@pytest.fixture(autouse=True)
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(buckets: Buckets, net: nn.Module, *, static_graph: bool = False) -> DistributedDataParallel:
    with buckets.arranged(net):
        wrapped = DistributedDataParallel(net, static_graph=static_graph)
    buckets.watch(wrapped, static_graph=static_graph)
    return wrapped


def step(buckets: Buckets, wrapped: DistributedDataParallel) -> None:
    buckets.batch_begins()
    wrapped(torch.randn(2, 4)).backward()


def held(wrapped: DistributedDataParallel) -> list[list[str]]:
    names = {param: name for name, param in wrapped.module.named_parameters()}
    buckets = wrapped.reducer._get_zeros_like_grad_buckets()
    return [[names[param] for param in bucket.parameters()] for bucket in buckets]


@pytest.mark.parametrize("static_graph", [False, True])
def test_its_first_buckets_are_those_that_the_other_made_anew(static_graph):
    first, second = Buckets(), Buckets()
    net = Net(unused=static_graph)
    wrapped = make(first, net, static_graph=static_graph)
    for _ in range(1 + static_graph):
        assert not first.order
        before = held(wrapped)
        step(first, wrapped)
        assert held(wrapped) == before
    order = first.order
    step(first, wrapped)
    rebuilt = held(wrapped)
    assert len(rebuilt) > 1
    assert [name for bucket in rebuilt for name in bucket] == order
    assert order.index("middle.bias") < order.index("first.weight")

    second.order = order
    again = make(second, net, static_graph=static_graph)
    assert held(again) == rebuilt
    for _ in range(3):
        step(second, again)
        assert held(again) == rebuilt
        assert second.order == order


def test_the_order_is_noted_where_gradients_are_reduced_and_hooks_go_afterwards():
    buckets, net = Buckets(), Net(unused=False)
    wrapped = make(buckets, net)
    with wrapped.no_sync():
        step(buckets, wrapped)
    assert not buckets.order
    step(buckets, wrapped)
    assert len(buckets.order) == 7
    assert all(param._post_accumulate_grad_hooks for param in net.parameters())
    step(buckets, wrapped)
    assert not any(param._post_accumulate_grad_hooks for param in net.parameters())


def test_an_order_of_other_parameters_is_kept_until_there_is_a_new_one():
    buckets, net = Buckets(), Net(unused=False)
    buckets.order = ["another.weight"]
    natural = DistributedDataParallel(net)
    wrapped = make(buckets, net)
    assert held(wrapped) == held(natural)
    assert buckets.order == ["another.weight"]
    step(buckets, wrapped)
    assert len(buckets.order) == 7
