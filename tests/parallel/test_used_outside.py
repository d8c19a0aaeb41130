"""Weights of a sharded model that are used outside of its forward, and copies of such a model."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from armature.checkpoint import state
from armature.errors import ConfigError
from armature.models.mixture import plan as mixture
from armature.models.mixture.model import MixtureDecoder
from armature.parallel import apply, copies, dtensors
from armature.training import epoch_metrics
from benchmarks.parity.harness import on_ranks
from tests.parallel.building import decoder_on_meta, options, parallelize


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def loss(model: nn.Sequential, x: torch.Tensor, saved: list[torch.Tensor]) -> torch.Tensor:
    """By a slice, a weight, a weight computed from another, operators with the weight on either
    side and in place.

    Last by copies of the weights, once a forward has gathered the weights and not the copies.
    """
    first, last = model[0].weight, model[2].weight
    out = model[2](model[:2](x)) + nn.functional.linear(x, first).mean(1, keepdim=True)
    sums = (
        (last - x[:, :1]).sum(1, keepdim=True)
        + (x @ first.mean(0))[:, None]
        - (1 - x[:, :1]) * last.sum()
    )
    total = (out + sums).square().mean()
    total += 0.1 * last.abs().sum()
    total = total.add_(first.square().sum(), alpha=0.1) + model(x).square().mean()
    return total + sum(
        ((p - 2 * s) ** 2).sum() for p, s in zip(model.parameters(), saved, strict=True)
    )


def computed() -> dict[str, Any]:
    from armature.parallel import mesh, process_group

    rank, ranks = process_group.rank(), process_group.ranks()
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    model = stack()
    if ranks > 1:
        sizes = dict.fromkeys(mesh.AXES, 1) | {"shard": ranks}
        device_mesh = mesh.build(sizes, device_type="cpu")
        apply.parallelize(
            model, None, device_mesh, options(), device=torch.device("cpu"), prefix=""
        )
    with dtensors.gathers():
        if ranks > 1:
            for change in (
                lambda w: w.add_(torch.ones(5, 3)),
                lambda w: w.__setitem__(0, torch.ones(3)),
            ):
                with torch.no_grad(), pytest.raises(RuntimeError, match=dtensors.MIXED):
                    change(model[0].weight)
        value = loss(model, x.chunk(ranks)[rank], [p.detach().clone() for p in model.parameters()])
        value.backward()
        alone = nn.functional.linear(x.chunk(ranks)[rank], model[0].weight).mean()
        (asked,) = torch.autograd.grad(alone, [model[0].weight])
    gradients = [p.grad.full_tensor() if ranks > 1 else p.grad for p in model.parameters()]  # pyright: ignore
    teacher = copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    return {
        "asked": (asked.full_tensor() if ranks > 1 else asked).flatten().tolist(),  # pyright: ignore
        "gradients": torch.cat([gradient.flatten() for gradient in gradients]).tolist(),
        "teacher": teacher(x).flatten().tolist(),
        "twice": copy.deepcopy(teacher)(x).flatten().tolist(),
        "model": model(x).flatten().tolist(),
        "kind": type(teacher).__name__,
        "trained": [p.requires_grad for p in (*teacher.parameters(), *model.parameters())],
    }


@pytest.mark.slow
def test_a_step_s_gradients_and_a_copy_s_outputs_are_those_of_one_process() -> None:
    alone = computed()
    for found in on_ranks(computed, ranks=2):
        for key in ("gradients", "asked", "teacher", "twice", "model"):
            assert found[key] == pytest.approx(alone[key], rel=1e-5, abs=1e-6)
        assert found["kind"] == "FSDPSequential"
        assert found["trained"] == alone["trained"] == [False] * 4 + [True] * 4


def difference_of_a_copied_decoder() -> float:
    model = decoder_on_meta(vocab_size=96, context=16, width=32, layers=2, heads=4)
    parallelize(model, axes={"shard": 2}, min_num_params=10**9)
    ids = torch.arange(2 * 16).view(2, 16)
    return float((copy.deepcopy(model)(ids) - model(ids)).abs().max())


def facts_of_a_copied_mixture(reshard: bool) -> tuple[float, int, bool]:
    """Return how far a copy's outputs are, how many units it has, and whether a weight of a router
    is its own.
    """
    with torch.device("meta"):
        model = MixtureDecoder(
            vocab_size=96,
            context=16,
            width=32,
            layers=2,
            heads=4,
            experts=4,
            active=2,
            expert_hidden=32,
        )
    parallelize(
        model,
        axes={"shard": 2},
        plan=mixture.PLAN,
        min_num_params=10**9,
        param_dtype=torch.bfloat16,
        reshard_after_forward=reshard,
    )
    ids = torch.arange(2 * 16).view(2, 16)
    model(ids, ids)  # without resharding, weights stay gathered
    copied = copy.deepcopy(copy.deepcopy(model))
    units = sum(isinstance(module, FSDPModule) for module in copied.modules())
    with torch.no_grad():
        difference = float((copied(ids) - model(ids)).abs().max())
        model.blocks["0"].mixture.router.weight.zero_()
    weight = copied.blocks["0"].mixture.router.weight
    return difference, units, bool(weight.full_tensor().any())


@pytest.mark.slow
def test_models_of_one_unit_are_copied() -> None:
    assert on_ranks(difference_of_a_copied_decoder, ranks=2) == [0.0, 0.0]
    for reshard in (True, False):  # the routers have units of their own, which nothing rounds
        assert on_ranks(facts_of_a_copied_mixture, reshard, ranks=2) == [(0.0, 3, True)] * 2


def test_gathering_goes_on_after_a_backward_within_it() -> None:
    before = vars(dtensors.DTensor)["__torch_function__"]
    with dtensors.gathers():
        outer = vars(dtensors.DTensor)["__torch_function__"]
        with dtensors.gathers():
            pass
        assert vars(dtensors.DTensor)["__torch_function__"] is outer
    assert vars(dtensors.DTensor)["__torch_function__"] is before


def read() -> dict[str, Any]:
    from armature.parallel import mesh, process_group

    model = stack()
    if (ranks := process_group.ranks()) > 1:
        dtensors.support_user_code()
        device_mesh = mesh.build(dict.fromkeys(mesh.AXES, 1) | {"shard": ranks}, device_type="cpu")
        apply.parallelize(
            model, None, device_mesh, options(), device=torch.device("cpu"), prefix=""
        )
    weight = model[0].weight.detach()
    results = epoch_metrics.Results(training=True)
    results.log("training_step", "mean", weight.mean(), on_step=True, on_epoch=False)
    return {
        "logged": type(results["training_step.mean"]._forward_cache)
        is torch.Tensor,  # rank 0 alone reads it
        "mean": weight.mean().item(),
        "largest": float(weight.abs().max()),
        "norm": torch.linalg.vector_norm(weight).item(),
        "sum": weight.square().sum().tolist(),
        "rows": weight.tolist(),
        "any": bool((weight == weight.max()).any()),
    }


@pytest.mark.slow
def test_a_number_that_is_read_is_that_of_the_whole_weight() -> None:
    alone = read()
    for found in on_ranks(read, ranks=2):
        for key, value in alone.items():
            assert (
                found[key] == pytest.approx(value, rel=1e-6)
                if key != "rows"
                else found[key] == value
            )


def kept_parts() -> list[Any]:
    from armature.parallel import mesh, process_group

    dtensors.support_user_code(watch_parts=True)
    device_mesh = mesh.build(
        dict.fromkeys(mesh.AXES, 1) | {"shard": process_group.ranks()}, device_type="cpu"
    )
    model = stack()
    apply.parallelize(model, None, device_mesh, options(), device=torch.device("cpu"), prefix="")
    dtensors._MOST_BYTES = 1  # the weight is larger
    weight = model[0].weight.detach()
    with torch.inference_mode():  # such a part has no version
        float(weight[0].sum())
    dtensors.check_parts()
    weight[0].zero_()
    float(weight[1].sum())
    kept = len(dtensors._parts)
    with pytest.raises(ValueError, match="Rows of a sharded weight"):
        dtensors.check_parts()
    dtensors.check_parts()
    return [kept, len(dtensors._parts)]


@pytest.mark.slow
def test_gathered_parts_are_not_kept_and_a_change_of_one_is_remembered() -> None:
    assert on_ranks(kept_parts, ranks=2) == [[1, 0]] * 2


def full_weights() -> Any:
    """Return the pickle's error and the whole weights."""
    from armature.parallel import mesh, process_group

    copies.refuse_pickles()
    model = stack()
    device_mesh = mesh.build(
        dict.fromkeys(mesh.AXES, 1) | {"shard": process_group.ranks()}, device_type="cpu"
    )
    apply.parallelize(model, None, device_mesh, options(), device=torch.device("cpu"), prefix="")
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=r"armature\.full_state_dict") as refused:
        torch.save(weights, io.BytesIO())
    strategy = SimpleNamespace(lightning_module_state_dict=lambda: state.module_state(model))
    module: Any = SimpleNamespace(trainer=SimpleNamespace(strategy=strategy))
    whole = state.full_state_dict(module, prefix="0.")
    return str(refused.value), {name: value.tolist() for name, value in whole.items()}


@pytest.mark.slow
def test_a_sharded_weight_is_not_pickled_and_its_whole_is_on_rank_0() -> None:
    (message, whole), (_, others) = on_ranks(full_weights, ranks=2)
    assert message.startswith(f"{__file__}:")
    assert others == {}
    assert whole == {name: value.tolist() for name, value in stack()[0].state_dict().items()}
