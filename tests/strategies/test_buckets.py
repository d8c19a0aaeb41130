"""A DDP that is made in the order of another's buckets has these from its first step on, and keeps them."""

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
                (self.head(self.scales).sum() + self.first(x).sum()) + self.middle.weight.sum() + self.middle.bias.sum()
            )
        return self.head(self.middle(self.first(x)) * self.scales).sum()


@pytest.fixture(autouse=True)
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(order: BucketOrder, net: nn.Module, *, static_graph: bool = False) -> OrderedDDP:
    wrapped = OrderedDDP(net, order=order.names, static_graph=static_graph)
    order.watch(wrapped, static_graph=static_graph)
    return wrapped


def step(order: BucketOrder, wrapped: OrderedDDP, **how: bool) -> None:
    order.batch_begins()
    wrapped(torch.randn(2, 4), **how).backward()


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
    step(order, wrapped)
    assert len(order.names) == PARAMETERS
    assert all(param._post_accumulate_grad_hooks for param in net.parameters())
    step(order, wrapped)
    assert not any(param._post_accumulate_grad_hooks for param in net.parameters())


def test_a_backward_of_the_users_own_is_not_taken_for_ddps():
    order, net = BucketOrder(), Net()
    wrapped = make(order, net)
    net(torch.randn(2, 4), backwards=True).backward()  # in a hook before the first batch
    order.batch_begins()
    net(torch.randn(2, 4), backwards=True).backward()  # within training_step
    wrapped(torch.randn(2, 4)).backward()
    names = order.names
    step(order, wrapped)
    assert [name for bucket in held(wrapped) for name in bucket] == names


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
