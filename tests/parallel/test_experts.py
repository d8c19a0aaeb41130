"""Mixtures train as in one process."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from armature.models.mixture.experts import Experts, Router
from armature.models.mixture.model import MixtureDecoder
from armature.models.mixture.plan import PLAN
from tests.parallel.building import parallelize
from tests.support.parity.harness import (
    DECODER,
    Job,
    Run,
    alone,
    assert_same,
    fit,
    fit_once,
    gathered_types,
    mesh,
    on_ranks,
    repeats,
)
from tests.support.volume import CollectiveCounter

pytestmark = pytest.mark.slow

MODEL = {
    **DECODER,
    "experts": 8,
    "active": 2,
    "expert_hidden": 32,
    "shared_hidden": 64,
    "dense_layers": 1,
}


def mixture(job: Job, **changes: Any) -> Job:
    path = "armature.models.mixture.model.MixtureDecoder"
    return replace(job, **{"model": path, "model_args": MODEL, **changes})


DDP, FSDP = mixture(Job("DDP", ranks=2)), mixture(mesh(2, shard=2))
EXPERT, OF_4 = mixture(mesh(2, shard=2, expert=2)), mixture(mesh(4, shard=4, expert=2))
TENSOR = mixture(mesh(4, shard=2, tensor=2, expert=2))
LAYOUTS = {  # each of these holds something that the others do not
    "ddp 2": DDP,
    "fsdp 2, expert 2, ignored": replace(EXPERT, ignore=True),
    "fsdp 4, expert 2, selective": mixture(
        mesh(4, shard=4, expert=2, activation_checkpointing="selective")
    ),
    "hsdp 2×2, expert 2": mixture(mesh(4, replicate=2, shard=2, expert=2)),
    "fsdp 2 × tensor 2, expert 4": mixture(mesh(4, shard=2, tensor=2, expert=4)),
    "fsdp 2 × pipeline 2, expert 2, zero bubble": mixture(
        mesh(4, pipe=2, shard=2, expert=2, schedule="zero_bubble")
    ),
    "fsdp 2 × pipeline 2, expert 2, interleaved, recomputed": mixture(
        mesh(
            4,
            pipe=2,
            shard=2,
            expert=2,
            schedule="interleaved_1f1b",
            activation_checkpointing="every",
        )
    ),
    "tensor 2 × pipeline 2, zero bubble": mixture(
        mesh(4, pipe=2, tensor=2, schedule="zero_bubble")
    ),
    "context 2 × fsdp 2, expert 4, ignored": mixture(
        mesh(4, context=2, shard=2, expert=4), ignore=True
    ),
}
GUARANTEED = ("fsdp 2, expert 2, ignored",)


def assert_same_with_biases(job: Job) -> Run:
    run, reference = assert_same(job), fit_once(replace(alone(job), steps=job.steps))
    biases = [name for name in reference.weights if name.endswith("mixture.bias")]
    assert len(biases) == 3
    assert all(np.array_equal(run.weights[name], reference.weights[name]) for name in biases)
    assert any(run.weights[name].any() for name in biases)
    if run.facts["load"] is not None and not (job.options.get("pipe") and job.ignore):
        assert run.facts["load"] == reference.facts["load"]
    return run


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.guarantee] if name in GUARANTEED else [])
        for name in LAYOUTS
    ],
)
def test_mixture_trains_as_in_one_process(name):
    job = LAYOUTS[name]
    run, axes = assert_same_with_biases(job), job.options
    if not axes.get("pipe"):
        spread = (
            job.ranks // axes.get("replicate", 1) if axes else 1
        )  # expert × rest: ranks of all other axes
        assert (
            run.facts["expert_elements"] * spread == fit_once(alone(job)).facts["expert_elements"]
        )


def traffic(mode: str) -> list[list[str]]:
    """Return the kinds of a step's collectives, forward and backward."""
    with torch.device("meta"):
        model = MixtureDecoder(**MODEL)  # pyright: ignore[reportArgumentType]
    options = {"expert": 2, "activation_checkpointing": mode}
    parallelize(model, axes={"shard": 2}, plan=PLAN, **options)
    ids = torch.randint(96, (2, 17))
    with CollectiveCounter() as forward:
        loss = model(ids[:, :-1], ids[:, 1:])
    with CollectiveCounter() as backward:
        loss.backward()
    return [[each["kind"] for each in seen.collectives] for seen in (forward, backward)]


@pytest.mark.parametrize(("mode", "again"), [("none", 2), ("every", 4), ("selective", 2)])
def test_units_are_gathered_before_the_host_waits_and_counts_are_exchanged_once(mode, again):
    """Of each of 3 mixtures: counts, rows and results; a recomputation repeats the last two."""
    for forward, backward in on_ranks(traffic, mode, ranks=2):
        exchanges = [each.count("all_to_all") for each in (forward, backward)]
        assert exchanges == [3 * 3, again * 3]
        # the embedding, the dense block, the first mixture, and the block after it
        assert forward[: forward.index("all_to_all")] == ["all_gather"] * 4


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (mixture(mesh(4, shard=4, expert=4)), TENSOR),
        (EXPERT, mixture(mesh(2, context=2, expert=2))),
        (mixture(Job("DeepSpeed", {"stage": 3}, ranks=2)), EXPERT),
    ],
    ids=["fsdp to tensor", "expert to context", "ZeRO-3 to expert"],
)
def test_a_checkpoint_of_one_expert_layout_resumes_under_another(saved, resumed, tmp_path):
    folder = str(tmp_path / "step=6")
    fit(replace(saved, steps=6, save=folder))
    assert_same_with_biases(replace(resumed, resume=folder))


def test_a_resume_on_the_same_layout_repeats_every_bit():
    assert repeats(EXPERT, fit_once(EXPERT))


def test_adapters_train_as_in_one_process_and_frozen_routers_keep_their_biases():
    job = replace(EXPERT, adapter={"rank": 2}, steps=4)
    run, reference = assert_same(job), fit_once(replace(alone(job), steps=job.steps))
    assert run.facts["load"] == reference.facts["load"]
    assert max(run.facts["load"][-1]) > 1
    assert not any(
        value.any() for name, value in run.weights.items() if name.endswith("mixture.bias")
    )


MUON = {"optimizer": "armature.optim.muon.Muon", "optimizer_args": {}}
SIX = {**MODEL, "experts": 6}


@pytest.mark.parametrize(
    ("job", "changes"),
    [
        (OF_4, MUON),
        (TENSOR, MUON),
        (EXPERT, {"optimizer": "armature.optim.adamw.adamw"}),  # fused
        (OF_4, {"model_args": SIX}),  # experts are cut within
        (EXPERT, {"ema": 0.9, "validate": True}),
    ],
)
def test_a_variant_trains_as_in_one_process(job, changes):
    assert_same_with_biases(replace(job, steps=6, **changes))


def test_bf16_equals_one_process_within_its_ties():
    assert_same(replace(EXPERT, precision="bf16-mixed"), tolerance=5e-2)


def test_sharding_does_not_round_a_routers_weight():
    job = replace(FSDP, steps=1, precision="bf16-mixed")
    assert gathered_types(Router, job) == [{torch.float32}] * 2


def _skips_nan(job: Job) -> Run:
    """Run a job whose third step is NaN on the last rank's experts alone, under
    `trainer.on_nan=skip`.
    """
    from armature.strategies.base import StrategyMixin
    from tests.support.parity.harness import _fit

    StrategyMixin.on_nan = "skip"
    passes, forward = 0, Experts.forward
    spoiled = 2 * job.accumulate * 3 + 1  # of three mixtures: the first pass of the third step

    def spoil(self: Experts, x_MD: torch.Tensor, count_E: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        passes += 1
        y_MD = forward(self, x_MD, count_E)
        return y_MD * torch.nan if dist.get_rank() == job.ranks - 1 and passes == spoiled else y_MD

    Experts.forward = spoil  # pyright: ignore[reportAttributeAccessIssue]
    return _fit(job)


def test_a_step_that_is_not_finite_on_one_ranks_experts_is_left_out_on_all():
    jobs = (replace(job, steps=4) for job in (EXPERT, DDP))
    run, reference = (on_ranks(_skips_nan, job, ranks=2)[0] for job in jobs)
    assert (
        np.isnan(run.grad_norms).tolist()
        == np.isnan(reference.grad_norms).tolist()
        == [False, False, True, False]
    )
    for name, value in reference.weights.items():
        assert np.allclose(run.weights[name], value, rtol=0, atol=1e-5), name
        assert np.isfinite(value).all()
    assert run.facts["load"] == reference.facts["load"]
