"""The state that is made to load an optimizer's into."""

import pytest
import torch

from armature.checkpoint import optimizers
from tests.lightning_habits.weights import ScheduleFree


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_weights_stay_as_they_are_also_with_eps_0(make):
    weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))]
    optimizer = make([{"params": weights[:1], "eps": 0}, {"params": weights[1:], "eps": 1e-6}], lr=0.1)
    optimizers.create_state(optimizer)
    assert all(torch.equal(weight, torch.ones(2)) for weight in weights)
    assert optimizer.state[weights[0]]
    assert [(group["lr"], group["eps"]) for group in optimizer.param_groups] == [(0.1, 0), (0.1, 1e-6)]


def test_an_optimizer_that_steps_in_its_training_mode_alone_gets_state():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = ScheduleFree([weight], lr=0.1)
    optimizers.create_state(optimizer)
    assert torch.equal(weight, torch.ones(2))
    assert "z" in optimizer.state[weight]
    group = optimizer.param_groups[0]
    assert (group["lr"], group["k"], group["train_mode"]) == (0.1, 0, False)


class Decays(torch.optim.SGD):
    """Weight decay beside the rate, as SGDW's paper has it, and weights that are kept on a sphere."""

    def step(self, closure=None):
        loss = super().step(closure)
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight.mul_(0.9).div_(weight.norm())
        return loss


def test_an_optimizer_that_changes_weights_at_rate_0_leaves_them_as_they_are():
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = Decays([weight], lr=0.1, momentum=0.9)
    optimizers.create_state(optimizer)
    assert weight.tolist() == [3.0, 4.0]
    assert "momentum_buffer" in optimizer.state[weight]
