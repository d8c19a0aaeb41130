"""What checkpoints hold of optimizers, and what comes back."""

import collections
from functools import partial

import pytest
import torch

from armature.checkpoint import optimizers, plain, state
from armature.checkpoint.writer import CheckpointWriter

T = torch.ones(2)


def sgd():
    weight = torch.nn.Parameter(T.clone())
    return weight, torch.optim.SGD([weight], lr=0.1)


# ---------------------------------------------------------------- parameter groups
def saved_groups(optimizer, names):
    return optimizers.param_groups(optimizer, optimizers.group_names(optimizer, names))


@pytest.mark.parametrize(
    "own", [{"initial_weight_decay": 0.5}, {"names": ["weight"], "added": True}]
)
def test_keys_that_users_put_into_a_group_come_back(own):
    weight, optimizer = sgd()
    optimizer.param_groups[0] |= {"lr": 0.025, **own}
    resumed = torch.optim.SGD([weight], lr=0.1)
    optimizers.restore_groups(resumed, [["w"]], saved_groups(optimizer, {weight: "w"}))
    assert resumed.param_groups[0] == optimizer.param_groups[0]


def test_groups_without_parameters_get_their_settings_back():
    def make():
        return torch.optim.SGD(
            [{"params": [], "lr": 0.3}, {"params": [weight]}, {"params": []}], lr=0.1
        )

    weight, _ = sgd()
    names, optimizer, resumed = {weight: "w"}, make(), make()
    for group in optimizer.param_groups:
        group["lr"] /= 4
    saved = optimizers.merge_groups([saved_groups(optimizer, names)] * 2)
    optimizers.restore_groups(resumed, optimizers.group_names(resumed, names), saved)
    assert [group["lr"] for group in resumed.param_groups] == [0.075, 0.025, 0.025]


# ---------------------------------------------------------------- saved whole
class Wrapping(torch.optim.Optimizer):
    """Steps an optimizer that shares the groups, and its state if asked to.

    The groups' lists are two.
    """

    def __init__(self, params, *, shares_state=False):
        super().__init__(params, {"lr": 0.1})
        self.base = torch.optim.Adam(self.param_groups, lr=0.1)
        if shares_state:
            self.state = self.base.state

    def step(self, closure=None):
        return self.base.step(closure)


def stepped(make):
    weight, _ = sgd()
    optimizer = make([weight])
    for group in optimizer.param_groups:
        group["lr"] = 0.025
    weight.grad = T
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("shares_state", [False, True])
def test_groups_and_states_that_optimizers_share_stay_shared(shares_state):
    def make(params):
        return Wrapping(params, shares_state=shares_state)

    saved = optimizers.whole_state(stepped(make))
    assert bool(saved[optimizers.INNER]) != shares_state
    weight, _ = sgd()
    optimizer = make([weight])
    optimizers.load_whole(optimizer, plain.restored(plain.plain(saved)))
    assert optimizer.base.state[weight]["step"] == 1
    assert optimizer.base.param_groups[0] is optimizer.param_groups[0]
    assert optimizer.param_groups[0]["lr"] == 0.025
    assert (optimizer.state is optimizer.base.state) == shares_state
    assert optimizer.param_groups[0]["params"][0] is weight


def test_a_state_that_is_saved_whole_keeps_its_type_and_what_belongs_to_no_weight():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state["k"] = torch.tensor([3])
    optimizer.state[weight]["slow"] = torch.full((2,), 1.001)
    assert optimizers.is_saved_whole(optimizer)
    other = torch.optim.SGD([torch.nn.Parameter(weight.detach().clone())], lr=0.5)
    optimizers.load_whole(other, optimizers.whole_state(optimizer))
    assert other.state["k"].item() == 3
    (slow,) = (entry["slow"] for key, entry in other.state.items() if key != "k")
    assert (slow.dtype, slow.tolist()) == (torch.float32, optimizer.state[weight]["slow"].tolist())
    assert other.param_groups[0]["lr"] == 0.1


# ---------------------------------------------------------------- containers in the entries
@pytest.mark.parametrize(
    "value",
    [
        {"a/b": 1, "c.d": [T, None, {}], 3: (T, [])},
        [[T], []],
        (),
        {},
        collections.deque([T, 1], maxlen=3),
        None,
        1.5,
        "text",
    ],
)
def test_entries_come_back_as_they_were(value):
    weight, optimizer = sgd()
    optimizer.state[weight]["key"] = value
    found = optimizers.by_weight(optimizer, {weight: "net.weight"}, index=0)
    again = optimizers.value_of(found[".optimizer_states.0.net.weight.key"], weight)
    assert repr(again) == repr(value)
    assert type(again) is type(value)


# ---------------------------------------------------------------- weights without state
def trained(steps, folder=None, dtype=torch.float32):
    """Train one layer for two steps, then both; with a folder save and load after the first two,
    into weights of a type.
    """

    def step(module, optimizer, layers):
        optimizer.zero_grad()
        inputs = torch.ones(2, 3).to(module["a"].weight)
        sum((module[layer](inputs) ** 2).mean() for layer in layers).backward()
        optimizer.step()

    def made():
        torch.manual_seed(0)
        module = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
        return module, steps(module.parameters())

    module, optimizer = made()
    for _ in range(2):
        step(module, optimizer, ["a"])
    if folder is not None:
        names = state.parameter_names(module)
        tensors = module.state_dict() | optimizers.by_weight(optimizer, names, index=0)
        groups = saved_groups(optimizer, names)
        CheckpointWriter().save(folder / "step=2", tensors, {})
        module, optimizer = made()
        module.to(dtype)
        state.read_weights(folder / "step=2", module, in_place=True)
        saved = [{"param_groups": groups}]
        optimizers.load_optimizers(folder / "step=2", module, [optimizer], saved=saved)
    for _ in range(3):
        step(module, optimizer, ["a", "b"])
    return module.state_dict()


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.AdamW, lr=0.1),
        partial(torch.optim.NAdam, lr=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    ],
    ids=["AdamW", "NAdam", "SGD"],
)
def test_a_weight_that_trains_later_has_no_state_of_steps_that_it_has_not_made(tmp_path, make):
    resumed = trained(make, tmp_path)
    narrow = trained(make, tmp_path / "bf16", torch.bfloat16)  # typed at the resume
    for name, value in trained(make).items():
        assert torch.equal(value, resumed[name]), name
        assert torch.allclose(value, narrow[name].float(), atol=0.03), name


def test_a_rate_is_the_saved_one_in_proportion_to_what_is_typed():
    # OneCycleLR's, and no schedule any more
    saved = {"lr": 0.025, optimizers.BUILT: {"initial_lr": 0.004, "max_lr": 0.1}}
    assert optimizers.settings_of(saved, {"lr": 0.025})["lr"] == 0.025
    assert optimizers.settings_of(saved, {"lr": 0.2})["lr"] == 0.05
