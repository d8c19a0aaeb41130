"""What ranks must have alike is compared, and what differs is named with ranks and amounts."""

import logging
from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from armature.errors import ConfigError
from armature.training import same_everywhere
from armature.training.same_everywhere import SameEverywhere, differences, digest, sums


def weights(change: float = 0.0, dtype: torch.dtype = torch.float32) -> same_everywhere.Sums:
    weight = torch.linspace(-1, 1, 64).reshape(8, 8)
    weight[0, 0] += change
    return sums({"weight": weight.to(dtype)})


def rank(**own: Any) -> dict[str, Any]:
    facts = {"the global step": 4, "the learning rate of SGD 0, group 0": 0.1}
    return {
        "stage": 0, "data rank": own.pop("place", 0), "batch": None, "facts": facts | own,
        "weights": {}, "buffers": {}, "logged": {},
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_may_differ_by_rounding_only(dtype):
    same, small, other = (
        rank() | {"weights": weights(change, dtype)} for change in (0.0, 1e-6, 1.0)
    )
    assert [*differences([same, same, small])] == []
    (found,) = differences([same, same, other])
    assert "weight" in found
    assert "rank 2" in found


def test_a_weight_that_one_rank_has_alone_differs():
    (found,) = differences([rank(), rank() | {"weights": {"added": (1.0, 1.0, 1e-4)}}])
    assert "added (missing on rank 0, 1 on rank 1)" in found


def test_weights_that_are_not_finite_are_left_to_on_nan():
    ranks = [rank() | {"weights": weights(change)} for change in (0.0, float("nan"))]
    assert [*differences(ranks)] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("the global step", 3), ("the learning rate of SGD 0, group 0", 0.01), ("the order", 7)],
)
def test_steps_and_rates_that_each_rank_decides_about_are_named(name, value):
    (found,) = differences([rank(), rank(**{name: value})])
    assert found.startswith(f"{name} is ")
    assert f"{value} on rank 1" in found


def test_another_stage_of_a_pipeline_may_have_other_groups():
    assert [*differences([rank(), rank(**{"the order": 1}) | {"stage": 1}])] == []


def test_ranks_that_share_samples_must_have_the_same_first_batch():
    # as the batches of transformers' collators
    batches = (UserDict({"x": torch.full((2,), value), "id": "text"}) for value in (1.0, 2.0))
    one, other = map(digest, batches)
    assert one != other
    assert [*differences([rank() | {"batch": one}, rank(place=1) | {"batch": other}])] == []
    (found,) = differences([rank() | {"batch": one}, rank() | {"batch": other}])
    assert "first batch of rank 1" in found


def test_weights_that_torch_cannot_add_up_are_left_out():
    named = {
        "float8": torch.zeros(8, dtype=torch.float8_e4m3fn),
        "scale": nn.Parameter(torch.tensor(2.0)),
    }
    assert sums(named) == {"scale": (2.0, 2.0, 1e-4)}


@pytest.fixture
def check(monkeypatch):
    """Check a run of two ranks, of which the other one has the given values."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(val_loop=SimpleNamespace(_results={})))
    trainer: Any = SimpleNamespace(
        optimizers=[optimizer], fit_loop=loop, callback_metrics={}, lightning_module=nn.Module()
    )
    module = nn.Module()
    module.register_buffer("seen", torch.ones(1))
    strategy = SimpleNamespace(
        replicates_weights=False, stage=0, steps_made={optimizer: 4}, module=module, world_size=2,
        data_size=2, data_rank=0,
    )  # fmt: skip
    monkeypatch.setattr(same_everywhere.StrategyMixin, "of", lambda trainer: strategy)
    monkeypatch.setattr(same_everywhere, "completed_batches", lambda trainer: 4)
    monkeypatch.setattr(same_everywhere.process_group, "ranks", lambda: 2)
    same = SameEverywhere()

    def compare(**other: Any) -> None:
        gather = lambda own: [own, own | {"data rank": 1} | other]  # noqa: E731
        monkeypatch.setattr(same_everywhere.process_group, "all_gather_object", gather)
        same.on_validation_start(trainer, trainer)

    return compare


def test_a_difference_ends_the_run_with_what_to_write(check):
    check()
    with pytest.raises(ConfigError, match=r"after step 4: the global step is 4 .*all_gather"):
        check(facts={"the global step": 5})


def test_buffers_and_logged_values_are_named_once(check, caplog):
    with caplog.at_level(logging.WARNING):
        check(buffers={"seen": (2.0, 2.0, 1e-4)}, logged={"val/x": (1.0, 1.0, 1e-4)})
        check(buffers={"seen": (2.0, 2.0, 1e-4)})
    assert len(caplog.records) == 2
    assert "seen (1 on rank 0, 2 on rank 1)" in caplog.text
    assert "sync_dist=True" in caplog.text


def test_ranks_that_begin_with_the_same_samples_are_named():
    one, other = ({"batch": "x", "data rank": place} for place in (0, 1))
    found = same_everywhere.repeated([one, one, other])
    assert found is not None
    assert "ranks 0 and 2" in found
    assert same_everywhere.repeated([one, one, other | {"batch": "y"}]) is None
    unknown = {"batch": digest(object())}  # a class whose tensors only its methods know
    assert same_everywhere.repeated([one | unknown, other | unknown]) is None
