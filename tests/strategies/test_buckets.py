"""A DDP that is made in the order of another's buckets has these from its first step on, and keeps
them.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from armature.strategies.buckets import BucketOrder, OrderedDDP

PARAMETERS = 7


class Net(nn.Module):
    """Registered in another order than it is used in, with more than a megabyte of weights."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.head, self.first = nn.Linear(600, 1), nn.Linear(4, 600)
        self.scales = nn.Parameter(torch.ones(600))
        self.middle = nn.Linear(600, 600)
        if unused:
            self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *, backwards: bool = False) -> torch.Tensor:
        if backwards:  # gradients become ready in another order
            return (
                (self.head(self.scales).sum() + self.first(x).sum())
                + self.middle.weight.sum()
                + self.middle.bias.sum()
            )
        return self.head(self.middle(self.first(x)) * self.scales).sum()


@pytest.fixture(autouse=True)
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(order: BucketOrder, net: nn.Module, *, static_graph: bool = False) -> OrderedDDP:
    wrapped = OrderedDDP(
        net, order=order.names, static_graph=static_graph, gradient_as_bucket_view=True
    )
    order.watch(wrapped, static_graph=static_graph)
    return wrapped


def step(order: BucketOrder, wrapped: OrderedDDP, **how: bool) -> None:
    loss = wrapped(torch.randn(2, 4), **how)
    order.backward_begins(reduces=wrapped.require_backward_grad_sync)
    loss.backward()
    order.backward_ends()


def held(wrapped: DistributedDataParallel) -> list[list[str]]:
    names = {param: name for name, param in wrapped.module.named_parameters()}
    buckets = wrapped.reducer._get_zeros_like_grad_buckets()
    return [[names[param] for param in bucket.parameters()] for bucket in buckets]


@pytest.mark.parametrize("static_graph", [False, True])
def test_its_first_buckets_are_those_that_the_other_made_anew(static_graph):
    first, second = BucketOrder(), BucketOrder()
    net = Net(unused=static_graph)
    wrapped = make(first, net, static_graph=static_graph)
    for _ in range(1 + static_graph):
        assert not first.names
        before = held(wrapped)
        step(first, wrapped)
        assert held(wrapped) == before
        assert bool(net.first.weight._post_accumulate_grad_hooks) is not bool(first.names)
    names = first.names
    step(first, wrapped)
    rebuilt = held(wrapped)
    assert len(rebuilt) > 1
    assert [name for bucket in rebuilt for name in bucket] == names
    assert names.index("middle.bias") < names.index("first.weight")

    second.names = names
    again = make(second, net, static_graph=static_graph)
    assert held(again) == rebuilt
    for backwards in (False, False) if static_graph else (True, False, True):
        step(second, again, backwards=backwards)
        assert held(again) == rebuilt
        assert second.names == names


def test_the_order_is_noted_where_gradients_are_reduced_and_hooks_go_afterwards():
    order, net = BucketOrder(), Net()
    wrapped = make(order, net)
    with wrapped.no_sync():
        step(order, wrapped)
    assert not order.names
    assert all(param._post_accumulate_grad_hooks for param in net.parameters())
    step(order, wrapped)
    assert len(order.names) == PARAMETERS
    assert not any(param._post_accumulate_grad_hooks for param in net.parameters())


def test_of_several_backwards_the_first_that_ddp_reduces_is_noted():
    order, net = BucketOrder(), Net()
    wrapped = make(order, net)
    net(torch.randn(2, 4), backwards=True).backward()  # the user's own
    step(order, wrapped)
    names = order.names
    step(order, wrapped, backwards=True)
    net(torch.randn(2, 4), backwards=True).backward()
    assert order.names == names == [name for bucket in held(wrapped) for name in bucket]


def test_gradients_of_several_types_have_the_same_buckets_again():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 4)
            self.precise = nn.Linear(4, 1, dtype=torch.float64)

        def forward(self, x):
            return self.precise(self.out(self.embed((x > 0).long().sum(1))).double()).sum()

    first, second, net = BucketOrder(), BucketOrder(), Mixed()
    wrapped = make(first, net)
    for _ in range(2):
        step(first, wrapped)
    second.names = first.names
    assert held(make(second, net)) == held(wrapped)


def test_an_order_of_other_parameters_is_kept_until_there_is_a_new_one():
    order, net = BucketOrder(), Net()
    order.names = ["another.weight"]
    natural = DistributedDataParallel(net)
    wrapped = make(order, net)
    assert held(wrapped) == held(natural)
    assert order.names == ["another.weight"]
    step(order, wrapped)
    assert len(order.names) == PARAMETERS


@pytest.mark.parametrize("damaged", [5, "head.bias", [[1]], None, {"head.bias": 1}])
def test_what_is_no_list_of_names_is_no_order(damaged):
    order = BucketOrder()
    order.names = damaged
    assert not order.names


def test_an_order_with_a_name_twice_is_not_taken():
    names = [name for name, _ in Net().named_parameters()]
    assert not OrderedDDP(Net(), order=[*names, names[0]]).is_ordered
    assert not OrderedDDP(Net(), order=[*names[:-1], names[0]]).is_ordered
    assert OrderedDDP(Net(), order=names[::-1]).is_ordered
