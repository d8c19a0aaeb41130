"""Weights that somebody keeps beside a model that is sharded."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from armature.parallel import left_behind


@pytest.fixture
def module():
    return nn.Sequential(nn.Linear(2, 3), nn.LSTM(3, 2))


def replace(module):
    before = list(module.named_parameters())
    for part in module:
        for name, param in part.named_parameters():
            setattr(part, name, nn.Parameter(param.detach().clone()))
    return left_behind.names_of(module, before)


KEPT = {
    ".ema.shadows[1]": lambda m: setattr(m, "ema", SimpleNamespace(shadows=[0, m[0].bias])),
    ".optimizer.param_groups[0]['params'][1]": lambda m: setattr(
        m, "optimizer", torch.optim.SGD(m[0].parameters())
    ),
    ".groups['head'][0]": lambda m: setattr(m, "groups", {"head": (m[0].bias,)}),
    ".sums (a key)": lambda m: setattr(m, "sums", {m[0].bias: 0.0}),
    ".penalty(…)": lambda m: setattr(m, "penalty", partial(torch.mul, m[0].bias)),
    ".penalty (its variable bias)": lambda m: setattr(m, "penalty", closure_over(m[0].bias)),
    ".read.__self__.bias": lambda m: setattr(m, "read", other_with(m[0].bias).state_dict),
    ".others[0].bias": lambda m: setattr(m, "others", [other_with(m[0].bias)]),
}


def closure_over(bias):
    return lambda: bias.sum()


def other_with(bias):
    other = nn.Linear(2, 3)
    other.bias = bias
    return other


@pytest.mark.parametrize("place", KEPT)
def test_a_kept_weight_is_found_with_its_place(module, place):
    KEPT[place](module)
    assert left_behind.find({"self": module}, replace(module))[f"self{place}"] == "0.bias"


def test_what_a_model_has_itself_is_not_left_behind(module):
    module.teacher, module.alias = [nn.Linear(2, 3)], [module[0]]
    module.keeps_itself, module.first = [module], module[0].weight.detach()
    replaced = replace(module)
    assert len(replaced) == 6
    assert (
        left_behind.find({"self": module, "callback": SimpleNamespace(module=module)}, replaced)
        == {}
    )


def test_a_large_object_is_searched_for_a_moment_only(module, monkeypatch):
    module.samples, module.kept = [[each] for each in range(1000)], dict(module.named_parameters())
    replaced = replace(module)
    assert left_behind.find({"self": module}, replaced)
    monkeypatch.setattr(left_behind, "MAX_OBJECTS", 3)
    assert left_behind.find({"self": module}, replaced) == {}
