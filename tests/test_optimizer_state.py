"""The state that is made to load an optimizer's into."""

import collections

import pytest
import torch

from armature.checkpoint import optimizers, plain, whole_optimizers
from armature.errors import ConfigError
from tests.lightning_habits.optimizers import ScheduleFree, SizesSteps

T = torch.ones(2)


@pytest.mark.parametrize(
    "make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad]
)
def test_weights_stay_as_they_are_also_with_eps_0(make):
    weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))]
    optimizer = make(
        [{"params": weights[:1], "eps": 0}, {"params": weights[1:], "eps": 1e-6}], lr=0.1
    )
    optimizers.create_state(optimizer)
    assert all(torch.equal(weight, torch.ones(2)) for weight in weights)
    assert optimizer.state[weights[0]]
    assert [(group["lr"], group["eps"]) for group in optimizer.param_groups] == [
        (0.1, 0),
        (0.1, 1e-6),
    ]


def test_an_optimizer_that_steps_in_its_training_mode_alone_gets_state():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = ScheduleFree([weight], lr=0.1)
    optimizers.create_state(optimizer)
    assert torch.equal(weight, torch.ones(2))
    assert "z" in optimizer.state[weight]
    group = optimizer.param_groups[0]
    assert (group["lr"], group["k"], group["train_mode"]) == (0.1, 0, False)


class Decays(torch.optim.SGD):
    """Weight decay beside the rate, as SGDW's paper has it, and weights that are kept on a
    sphere.
    """

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


@pytest.mark.parametrize("settings", [{}, {"lr": None}])
def test_an_optimizer_without_a_rate_gets_state(settings):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = SizesSteps([weight], settings)
    optimizers.create_state(optimizer)
    assert torch.equal(weight, torch.ones(2))
    assert "sum" in optimizer.state[weight]
    assert {
        key: value for key, value in optimizer.param_groups[0].items() if key != "params"
    } == settings


# ---------------------------------------------------------------- parameter groups
def saved_groups(optimizer, names):
    return optimizers.param_groups(optimizer, optimizers.group_names(optimizer, names))


# the latter two are names of ours
@pytest.mark.parametrize(
    "own", [{"initial_weight_decay": 0.5}, {"names": ["weight"], "added": True}]
)
def test_keys_that_users_put_into_a_group_come_back(own):
    weight = torch.nn.Parameter(T.clone())
    names, optimizer = {weight: "w"}, torch.optim.SGD([weight], lr=0.1)
    optimizer.param_groups[0] |= {"lr": 0.025, **own}
    resumed = torch.optim.SGD([weight], lr=0.1)
    optimizers.restore_groups(resumed, [["w"]], saved_groups(optimizer, names))
    assert resumed.param_groups[0] == optimizer.param_groups[0]


def test_groups_without_parameters_get_their_settings_back():
    def make():
        return torch.optim.SGD(
            [{"params": [], "lr": 0.3}, {"params": [weight]}, {"params": []}], lr=0.1
        )

    weight = torch.nn.Parameter(T.clone())
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


def stepped(weight, make, *, lr):
    optimizer = make([weight])
    for group in optimizer.param_groups:
        group["lr"] = lr
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("shares_state", [False, True])
def test_groups_and_states_that_optimizers_share_stay_shared(shares_state):
    def make(params):
        return Wrapping(params, shares_state=shares_state)

    saved = whole_optimizers.whole_state(stepped(torch.nn.Parameter(torch.ones(2)), make, lr=0.025))
    assert bool(saved[whole_optimizers.INNER]) != shares_state
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = make([weight])
    whole_optimizers.load_whole(optimizer, plain.restored(plain.plain(saved)))
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
    assert whole_optimizers.is_saved_whole(optimizer)
    other = torch.optim.SGD([torch.nn.Parameter(weight.detach().clone())], lr=0.5)
    whole_optimizers.load_whole(other, whole_optimizers.whole_state(optimizer))
    assert other.state["k"].item() == 3
    (slow,) = (entry["slow"] for key, entry in other.state.items() if key != "k")
    assert (slow.dtype, slow.tolist()) == (torch.float32, optimizer.state[weight]["slow"].tolist())
    assert other.param_groups[0]["lr"] == 0.1


class Divided(torch.optim.SGD):
    def consolidate_state_dict(self, to=0):
        """As ZeroRedundancyOptimizer's."""


def test_an_optimizer_that_divides_its_state_itself_is_refused():
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigError, match="Divided divides its state over ranks by itself"):
        whole_optimizers.check(Divided([weight], lr=0.1), {weight: "weight"}, held=["weight"])


# ---------------------------------------------------------------- containers in the entries
@pytest.mark.parametrize(
    "value",
    [
        {"a/b": 1, "c.d": [T, None, {}], 3: (T, [])},
        [[T], []],
        (),
        {},
        collections.deque([T, 1], maxlen=3),
        collections.defaultdict(int, a=2),
        None,
        1.5,
        "text",
        {"{3}": 1, "[0]": 2},
    ],
)
def test_entries_come_back_as_they_were(value):
    weight = torch.nn.Parameter(T.clone())
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight]["key.x"] = value
    found = optimizers.by_weight(optimizer, {weight: "net.weight"}, index=0)
    prefix = ".optimizer_states.0.net.weight."
    assert all(name.startswith(prefix) and "." not in name.removeprefix(prefix) for name in found)
    again = optimizers.nested({name.removeprefix(prefix): leaf for name, leaf in found.items()})
    assert repr(again["key.x"]) == repr(value)
    assert type(again["key.x"]) is type(value)


REFUSED = [{0.5: T}, {"": T}, {None: 1}, collections.Counter(a=1), {1, 2}, torch.Size([2]), len]


@pytest.mark.parametrize("value", REFUSED)
def test_entries_that_would_come_back_otherwise_are_refused(value):
    weight = torch.nn.Parameter(T.clone())
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight]["key"] = [value]
    with pytest.raises(ConfigError, match=r"SGD\.state: .*key"):
        optimizers.by_weight(optimizer, {weight: "w"}, index=0)
