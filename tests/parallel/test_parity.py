"""Every layout trains as one process does: losses, gradient norms, final weights, resumes."""

import functools
import itertools
from dataclasses import replace

import pytest

from tests.support.parity.harness import (
    DECODER,
    LAYOUTS,
    Job,
    alone,
    assert_same,
    fit,
    fit_once,
    mesh,
    repeats,
)

pytestmark = pytest.mark.slow

HEADS = {
    "head_dim": 12,
    "attention_bias": True,
    "qk_norm": "weighted",
    "windows": [5, None, 3, None],
}
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
DDP, FSDP, TENSOR, PIPE = Job("DDP", ranks=2), mesh(2, shard=2), mesh(2, tensor=2), mesh(2, pipe=2)
EVERY = {**LAYOUTS, CONTEXT: mesh(4, shard=2, context=2)}
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
    (DEEPSPEED, "deepspeed 1 at 2"),
    ("deepspeed 1 at 2", "single"),
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


VALUE = {"clip": 1e-3, "clip_algorithm": "value"}
UNEQUAL = (
    "single, micro-batch 4",
    "ddp 2",
    "fsdp 2",
    "fsdp 2 × tensor 2",
    "pipeline 2, 1f1b",
    "fsdp 2 × pipeline 2",
    "deepspeed 2 at 2",
    "deepspeed 3 at 2",
)
TWO_A_UNIT = {"shard": 2, "min_num_params": 10_000}  # blocks
VARIANTS = {  # layouts, and what is changed of the model and of how it is trained
    "unequal numbers of targets": ([LAYOUTS[name] for name in UNEQUAL], {"ignore": True}),
    "unequal numbers of targets, unclipped": ([FSDP], {"ignore": True, "clip": None}),
    "unequal numbers of targets, clipped by value": ([FSDP], {"ignore": True, **VALUE}),
    "clipped by value": ([FSDP, TENSOR, PIPE], VALUE),
    "tied embeddings": (
        [FSDP, TENSOR, LAYOUTS["tensor 2"]],
        {"model_args": {**DECODER, "tied": True}},
    ),
    "biases, weighted norms of heads, windows": (
        [TENSOR, mesh(4, shard=2, tensor=2, sequence_parallel=False), PIPE],
        {"model_args": {**DECODER, **HEADS}},
    ),
    "attention within documents": (
        [FSDP, TENSOR],
        {"model_args": {**DECODER, "document_token": 7}},
    ),
    "vision transformer": (
        [FSDP, TENSOR, PIPE],
        {"model": "armature.models.vit.model.VisionTransformer", "model_args": VIT},
    ),
    "BatchNorm, and no plan": (
        [DDP, FSDP],
        {"model": "tests.parallel.users.conv.ConvNet", "model_args": CONV},
    ),
    "a user's model with a plan of ten lines": (
        [DDP, FSDP, TENSOR, PIPE, LAYOUTS["2×2×2"], LAYOUTS[DEEPSPEED]],
        {"model": "tests.parallel.users.encoder.model.Encoder", "model_args": ENCODER},
    ),
    "recomputed": (
        [
            mesh(2, shard=2, activation_checkpointing="every"),
            mesh(2, **TWO_A_UNIT, activation_checkpointing=3),
            mesh(2, **TWO_A_UNIT, activation_checkpointing="half"),
            mesh(2, **TWO_A_UNIT, activation_checkpointing="every", compile="block"),
            mesh(2, tensor=2, activation_checkpointing="selective"),
            mesh(2, pipe=2, activation_checkpointing=2),
        ],
        {},
    ),
    "Muon": (
        [DDP, FSDP, LAYOUTS["fsdp 2 × tensor 2"]],
        {"optimizer": "armature.optim.muon.Muon", "optimizer_args": {}},
    ),
}


@pytest.mark.parametrize("name", guaranteed([name for name in EVERY if name != "single"], COMPARED))
def test_layout_trains_as_one_process_does(name):
    assert_same(EVERY[name])


@pytest.mark.parametrize(
    "name", ["fsdp 2, ZeRO-2", "tensor 2, sequence parallel", "pipeline 2, zero bubble"]
)
def test_validation_loss_equals_one_process(name):
    assert_same(replace(LAYOUTS[name], validate=True))


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(replace(job, **changes), id=f"{name} {number}")
        for name, (jobs, changes) in VARIANTS.items()
        for number, job in enumerate(jobs)
    ],
)
def test_a_variant_trains_as_one_process_does(job):
    assert_same(job)


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
def test_bf16_equals_one_process_within_its_rounding(name, precision):
    assert_same(replace(LAYOUTS[name], precision=precision), tolerance=2e-2)


@pytest.mark.parametrize("name", guaranteed(DISTINCT, REPEATED))
def test_a_resume_under_the_same_layout_repeats_every_bit(name):
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


@pytest.mark.parametrize(
    ("saved", "resumed"), guaranteed([*itertools.permutations(DISTINCT, 2)], EXCHANGED)
)
def test_a_checkpoint_of_one_layout_resumes_under_another(saves, saved, resumed):
    assert_same(replace(EVERY[resumed], resume=saves(saved)))


@pytest.mark.parametrize(
    ("saved", "resumed"), [("single", "fsdp 2, ZeRO-2"), ("tensor 2", "pipeline 2, 1f1b")]
)
def test_averaged_weights_are_saved_and_resumed_under_any_layout(saved, resumed, tmp_path):
    folder = str(tmp_path / "step=6")
    fit(replace(LAYOUTS[saved], steps=6, ema=0.9, save=folder))
    job = replace(LAYOUTS[resumed], ema=0.9, validate=True, resume=folder)
    assert_same(job)


def test_an_optimizer_of_whole_weights_is_refused_where_the_engine_flattens_them():
    job = replace(LAYOUTS[DEEPSPEED], optimizer="torch.optim.Adafactor", optimizer_args={})
    with pytest.raises(RuntimeError, match="Adafactor needs the whole model"):
        fit(job)


@pytest.mark.parametrize("name", ["fsdp 2", "hsdp 2×2", "fsdp 2 × tensor 2"])
def test_a_rank_holds_its_share_of_weights_gradients_and_optimizer_state(name):
    job = LAYOUTS[name]
    share = (job.options.get("tensor") or 1) * 2  # each axis has two ranks
    whole = fit_once(alone(job)).facts["bytes"]
    assert fit_once(job).facts["bytes"] == pytest.approx(whole / share, rel=0.1)
