"""DDP has its final buckets from the first step on, in an order that no step decides."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from armature.strategies.ddp import OrderedDDP


class Net(nn.Module):
    """Registered in another order than it is used in, with more than a megabyte of weights."""

    def __init__(self, *, unused: bool = False) -> None:
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


def held(wrapped: DistributedDataParallel) -> list[list[str]]:
    names = {param: name for name, param in wrapped.module.named_parameters()}
    buckets = wrapped.reducer._get_zeros_like_grad_buckets()
    return [[names[param] for param in bucket.parameters()] for bucket in buckets]


def test_buckets_stay_in_the_reverse_order_of_the_parameters():
    net = Net()
    wrapped = OrderedDDP(net, gradient_as_bucket_view=True)
    first = held(wrapped)
    assert len(first) > 1
    names = [name for name, _ in net.named_parameters()]
    assert [name for bucket in first for name in bucket] == names[::-1]
    for _ in range(3):
        wrapped(torch.randn(2, 4)).backward()
        assert held(wrapped) == first


def test_with_unused_parameters_buckets_are_torchs_which_stay():
    natural = DistributedDataParallel(Net(), find_unused_parameters=True)
    wrapped = OrderedDDP(Net(unused=True), find_unused_parameters=True)
    first = held(wrapped)
    assert len(held(natural)) == len(first) > 1
    for _ in range(3):
        wrapped(torch.randn(2, 4)).backward()
        assert held(wrapped) == first
