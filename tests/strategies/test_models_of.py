"""Which parts of a LightningModule are models."""

import pytest
import torch
from torch import nn

from armature.strategies.base import models_of


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_containers_are_none_and_a_part_of_torchscript_is_one():
    module = nn.Module()
    module.blocks = nn.ModuleList([nn.Linear(1, 1)])
    module.traced = torch.jit.trace(nn.Linear(1, 1), torch.zeros(1, 1), check_trace=False)
    assert [name for name, _ in models_of(module)] == ["blocks.0", "traced"]
