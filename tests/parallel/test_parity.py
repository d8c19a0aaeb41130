"""Every layout trains as one process does: losses, gradient norms, final weights, resumes."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.parity import context
from tests.support.parity.harness import (
    LAYOUTS,
    Job,
    Run,
    difference,
    fit,
    fit_once,
    mesh,
    repeats,
)

TOLERANCE = 1e-5
VIT = {
    "image_size": 8,
    "patch_size": 2,
    "channels": 1,
    "classes": 10,
    "width": 32,
    "layers": 4,
    "heads": 4,
}
CONV = {"image_size": 8, "channels": 1, "classes": 10, "width": 8}
ENCODER = {"vocab_size": 96, "context": 16, "width": 32, "depth": 4}
DEEPSPEED = "deepspeed 3 at 2"
CONTEXT = "fsdp 2 × context 2"
EVERY = {**LAYOUTS, CONTEXT: context.LAYOUTS[CONTEXT]}
FAMILIES = (  # a layout of each strategy; the expert axis is in test_experts.py
    "single",
    "ddp 2",
    "fsdp 2",
    "hsdp 2×2",
    "tensor 2, sequence parallel",
    "pipeline 2, 1f1b",
    CONTEXT,
    DEEPSPEED,
)
DISTINCT = (  # whose ranks hold other tensors than those of all others
    *FAMILIES,
    "pipeline 2, interleaved 1f1b",
    "pipeline 2, zero bubble",
    "fsdp 2 × tensor 2",
    "tensor 2 × pipeline 2",
    "2×2×2",
    "deepspeed 1 at 2",
)
COMPARED = (*FAMILIES, "pipeline 2, zero bubble", "fsdp 2 × tensor 2")
REPEATED = ("ddp 2", "fsdp 2", "tensor 2, sequence parallel", "pipeline 2, 1f1b", DEEPSPEED)
EXCHANGED = (  # each family saves once and resumes once
    ("single", "fsdp 2 × tensor 2"),
    ("ddp 2", "pipeline 2, zero bubble"),
    ("fsdp 2", "ddp 2"),
    ("hsdp 2×2", "tensor 2, sequence parallel"),
    ("tensor 2, sequence parallel", DEEPSPEED),
    ("pipeline 2, 1f1b", CONTEXT),
    (CONTEXT, "hsdp 2×2"),
    (DEEPSPEED, "single"),
)


def guaranteed(cases, chosen) -> list:
    """The chosen ones hold the contract, and run in `make test`; the others in `make test-all`."""
    marks = pytest.mark.guarantee
    return [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=marks)
        if each in chosen
        else each
        for each in cases
    ]


def assert_same(job: Job, *, tolerance: float = TOLERANCE) -> Run:
    run = fit_once(job)
    far = difference(run, _reference(job))
    assert max(far.values()) <= tolerance, far
    return run


def _reference(job: Job) -> Run:
    return fit_once(
        replace(job, strategy="SingleDevice", options={}, ranks=1, resume=None, save=None)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", guaranteed([name for name in EVERY if name != "single"], COMPARED))
def test_layout_trains_as_one_process_does(name: str) -> None:
    assert_same(EVERY[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fsdp 2, ZeRO-2", "tensor 2, sequence parallel", "pipeline 2, zero bubble"]
)
def test_validation_loss_equals_one_process(name: str) -> None:
    job = replace(LAYOUTS[name], validate=True)
    run = assert_same(job)
    assert run.facts["val/loss"] == pytest.approx(_reference(job).facts["val/loss"], rel=TOLERANCE)


IGNORING = [
    "single, micro-batch 4",
    "ddp 2",
    "fsdp 2",
    "fsdp 2 × tensor 2",
    "pipeline 2, 1f1b",
    "fsdp 2 × pipeline 2",
    "deepspeed 2 at 2",
    "deepspeed 3 at 2",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", IGNORING)
def test_each_target_has_the_same_weight_if_micro_batches_have_unequal_numbers(name: str) -> None:
    job = replace(LAYOUTS[name], ignore=True)
    far = difference(
        fit(job), _reference(replace(job, accumulate=1))
    )  # the mean over all targets per step
    assert max(far.values()) <= TOLERANCE, far


@pytest.mark.slow
@pytest.mark.parametrize(
    "clip", [{"clip": None}, {"clip": 1e-3, "clip_algorithm": "value"}], ids=["none", "value"]
)
def test_targets_have_the_same_weight_under_any_clipping(clip: dict) -> None:
    job = replace(mesh(2, shard=2), ignore=True, **clip)
    far = difference(fit(job), _reference(replace(job, accumulate=1)))
    assert max(far.values()) <= TOLERANCE, far


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"shard": 2}, {"tensor": 2}, {"tensor": 2, "sequence_parallel": False}]
)
def test_tied_embeddings_stay_tied(options: dict) -> None:
    job = mesh(2, **options)
    assert_same(replace(job, model_args={**job.model_args, "tied": True}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"tensor": 2}, {"shard": 2, "tensor": 2, "sequence_parallel": False}, {"pipe": 2}]
)
def test_biases_weighted_norms_of_heads_and_windows_train_as_one_process_does(
    options: dict,
) -> None:
    job = mesh(4 if "shard" in options else 2, **options)
    sizes = {
        "head_dim": 12,
        "attention_bias": True,
        "qk_norm": "weighted",
        "windows": [5, None, 3, None],
    }
    assert_same(replace(job, model_args={**job.model_args, **sizes}))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"shard": 2}, {"tensor": 2}])
def test_attention_within_documents_trains_as_one_process_does(options: dict) -> None:
    job = mesh(2, **options)
    assert_same(replace(job, model_args={**job.model_args, "document_token": 7}))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"shard": 2}, {"tensor": 2}, {"pipe": 2}])
def test_vision_transformer_trains_under_every_axis(options: dict) -> None:
    assert_same(
        replace(
            mesh(2, **options), model="armature.models.vit.model.VisionTransformer", model_args=VIT
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"shard": 2}, {"tensor": 2}, {"pipe": 2}])
def test_clipping_by_value_trains_as_one_process_does(options: dict) -> None:
    assert_same(replace(mesh(2, **options), clip=1e-3, clip_algorithm="value"))


@pytest.mark.slow
@pytest.mark.parametrize("job", [Job("DDP", ranks=2), mesh(2, shard=2)], ids=["ddp", "fsdp"])
def test_a_model_without_a_plan_trains_and_its_batchnorm_sees_all_ranks(job: Job) -> None:
    assert_same(replace(job, model="tests.parallel.users.conv.ConvNet", model_args=CONV))


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        Job("DDP", ranks=2),
        mesh(2, shard=2),
        mesh(2, tensor=2),
        mesh(2, pipe=2),
        LAYOUTS["2×2×2"],
        LAYOUTS[DEEPSPEED],
    ],
    ids=["ddp", "fsdp", "tensor", "pipeline", "3d", "deepspeed"],
)
def test_a_users_model_with_a_plan_of_ten_lines_trains_under_every_strategy(job: Job) -> None:
    assert_same(
        replace(job, model="tests.parallel.users.encoder.model.Encoder", model_args=ENCODER)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("every", {"shard": 2}),
        (3, {"shard": 2, "min_num_params": 10_000}),
        ("selective", {"tensor": 2}),
        ("half", {"shard": 2, "min_num_params": 10_000}),
        (2, {"pipe": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_activation_checkpointing_changes_nothing(mode: str | int, options: dict) -> None:
    assert_same(mesh(2, activation_checkpointing=mode, **options))


@pytest.mark.slow
def test_compiled_blocks_change_nothing() -> None:
    assert_same(
        mesh(2, shard=2, compile="block", activation_checkpointing="every", min_num_params=10_000)
    )


@pytest.mark.slow
def test_muon_trains_as_one_process_does_when_matrices_are_sharded() -> None:
    job = replace(
        LAYOUTS["fsdp 2 × tensor 2"], optimizer="armature.optim.muon.Muon", optimizer_args={}
    )
    assert_same(job)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("ddp 2", "bf16-mixed"),
        ("fsdp 2", "bf16-mixed"),
        ("tensor 2, sequence parallel", "bf16-mixed"),
        ("pipeline 2, zero bubble", "bf16-mixed"),
        ("fsdp 2", "bf16-true"),
        ("pipeline 2, 1f1b", "bf16-true"),
    ],
)
def test_bf16_equals_one_process_within_its_rounding(name: str, precision: str) -> None:
    assert_same(replace(LAYOUTS[name], precision=precision), tolerance=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", guaranteed(DISTINCT, REPEATED))
def test_a_resume_under_the_same_layout_repeats_every_bit(name: str) -> None:
    assert repeats(EVERY[name], fit_once(EVERY[name]))


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    """The checkpoint of a layout in the middle of its run, which is made once."""

    @functools.cache
    def save(name: str) -> str:
        folder = str(tmp_path_factory.mktemp("saved") / "step=6")
        fit(replace(EVERY[name], steps=6, save=folder))
        return folder

    return save


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "resumed"), guaranteed([*itertools.permutations(DISTINCT, 2)], EXCHANGED)
)
def test_a_checkpoint_of_one_layout_resumes_under_another(saves, saved: str, resumed: str) -> None:
    assert_same(replace(EVERY[resumed], resume=saves(saved)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "resumed"), [("single", "fsdp 2, ZeRO-2"), ("tensor 2", "pipeline 2, 1f1b")]
)
def test_averaged_weights_are_saved_and_resumed_under_any_layout(
    saved: str, resumed: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "step=6")
    fit(replace(LAYOUTS[saved], steps=6, ema=0.9, save=folder))
    job = replace(LAYOUTS[resumed], ema=0.9, validate=True, resume=folder)
    run = assert_same(job)
    assert run.facts["val/loss"] == pytest.approx(_reference(job).facts["val/loss"], rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp 2", "hsdp 2×2", "fsdp 2 × tensor 2"])
def test_a_rank_holds_its_share_of_weights_gradients_and_optimizer_state(name: str) -> None:
    job = LAYOUTS[name]
    share = (job.options.get("tensor") or 1) * 2  # each axis has two ranks
    whole = _reference(job).facts["bytes"]
    assert fit_once(job).facts["bytes"] == pytest.approx(whole / share, rel=0.1)
