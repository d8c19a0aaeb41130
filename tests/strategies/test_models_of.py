"""Which parts of a LightningModule are models."""

import pytest
import torch
from torch import nn
from torchmetrics import Metric, MetricCollection

from armature.strategies.base import models_of, move_others


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_containers_and_parts_of_others_are_none_and_a_part_of_torchscript_is_one():
    module = nn.Module()
    module.blocks = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    module.net = nn.Sequential(module.blocks[1])
    module.traced = torch.jit.trace(nn.Linear(1, 1), torch.zeros(1, 1))
    assert [name for name, _ in models_of(module)] == ["blocks.0", "net", "traced"]


class Distance(Metric):
    """As FID or LPIPS: a network within a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)

    def update(self) -> None: ...

    def compute(self) -> None: ...


def test_a_metric_that_holds_a_network_is_none_and_moves_to_the_device_whole():
    module = nn.Module()
    module.net = nn.Linear(1, 1)
    module.distance = Distance()
    module.several = MetricCollection([Distance()])
    module.containers = nn.ModuleDict({"val": Distance()})
    assert [name for name, _ in models_of(module)] == ["net"]
    move_others(module, {module.net}, torch.device("meta"))
    assert {name for name, param in module.named_parameters() if not param.is_meta} == {
        "net.weight",
        "net.bias",
    }
