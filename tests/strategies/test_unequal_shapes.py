"""What cannot be gathered is refused by name on all ranks, before torch aborts or hangs."""

from types import SimpleNamespace

import lightning.pytorch as L
import pytest
import torch

from armature.errors import ConfigError
from armature.parallel import process_group
from armature.strategies.single import SingleDevice


@pytest.fixture
def module():
    """A module in a process group, which Lightning names to the strategy."""
    process_group.init(alone=True)
    module = L.LightningModule()
    module.trainer = SimpleNamespace(strategy=SingleDevice())  # pyright: ignore[reportAttributeAccessIssue]
    yield module
    process_group.destroy()


@pytest.mark.parametrize(("shape", "other"), [((8, 2), (9, 2)), ((8, 2), (8,)), ((), (1,))])
def test_shapes_that_differ_are_refused_with_the_remedy(monkeypatch, module, shape, other):
    monkeypatch.setattr(process_group, "all_gather_object", lambda own: [own, own, other])
    with pytest.raises(
        ConfigError, match=r"self\.all_gather.* on rank 0 and .* on rank 2.*torchmetrics"
    ) as caught:
        module.all_gather(torch.zeros(shape))
    assert str(shape) in str(caught.value)
    assert str(other) in str(caught.value)


def test_equal_shapes_are_gathered(module):
    assert module.all_gather(torch.ones(2)).tolist() == [1, 1]
