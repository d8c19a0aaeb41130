"""A context axis: ranks that share samples and divide their positions train as one process does."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from armature.errors import ConfigError
from armature.models.decoder.model import Decoder
from armature.models.decoder.plan import PLAN
from armature.parallel import plan_check, randomness
from armature.parallel.whole_weights import whole
from tests.parallel.building import decoder_on_meta, parallelize
from tests.support.parity.harness import DECODER, Job, assert_same, mesh, on_ranks

UNEQUAL: dict[str, Any] = {"ignore": True}
DOCUMENTS, WINDOWS = {"document_token": 7}, {"windows": [5, None, 3, None]}
GATHERED = {"context": 2, "context_method": "all_gather"}
CONTEXT, BESIDE_FSDP = mesh(2, context=2), mesh(4, shard=2, context=2)
BESIDE_TENSOR, BESIDE_PIPELINE = mesh(4, context=2, tensor=2), mesh(4, context=2, pipe=2)


def of_model(job: Job, **arguments: Any) -> Job:
    return replace(job, model_args={**DECODER, **arguments})


LAYOUTS = {
    "context 4, for 2 key-value heads": mesh(4, context=4),
    "context 2, documents": of_model(CONTEXT, **DOCUMENTS),
    "context 2, windows": of_model(CONTEXT, **WINDOWS),
    "context 2, selectively recomputed, unequal targets": replace(
        mesh(2, context=2, activation_checkpointing="selective"), **UNEQUAL
    ),
    "context 2, keys gathered, documents, windows, unequal targets": of_model(
        replace(mesh(2, **GATHERED), **UNEQUAL), **DOCUMENTS, **WINDOWS
    ),
    "context 4, keys gathered for 2 heads": of_model(mesh(4, context=4), heads=2, **WINDOWS),
    "context 2 × tensor 2, keys gathered for 2 heads, unequal targets": of_model(
        replace(BESIDE_TENSOR, **UNEQUAL), heads=2
    ),
    "fsdp 2 × context 2, unequal targets": replace(BESIDE_FSDP, **UNEQUAL),
    "replicate 2 × context 2": mesh(4, replicate=2, context=2),
    "context 2 × tensor 2, sequence parallel, documents, unequal targets": of_model(
        replace(BESIDE_TENSOR, **UNEQUAL), **DOCUMENTS
    ),
    "context 2 × pipeline 2, 1f1b, unequal targets": replace(BESIDE_PIPELINE, **UNEQUAL),
    "context 2 × pipeline 2, zero bubble": mesh(4, context=2, pipe=2, schedule="zero_bubble"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_context_axis_trains_as_one_process_does(name):
    assert_same(replace(LAYOUTS[name], validate=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16-mixed", "model_args": {**DECODER, "qk_norm": True}},
        {
            "precision": "bf16-mixed",
            "options": {"context": 2, "activation_checkpointing": "selective"},
        },
        {"precision": "bf16-true"},
    ],
    ids=["mixed", "mixed, recomputed", "true"],
)
def test_bf16_equals_one_process_within_its_rounding(changes):
    assert_same(replace(CONTEXT, **changes), tolerance=2e-2)


HEADS = {"head_dim": 12, "attention_bias": True, "qk_norm": "weighted"}
ADAPTER = {"rank": 2, "targets": ["*attention.[qkvo]"], "train": ["*norm*"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "changes"),
    [
        (of_model(BESIDE_FSDP, **HEADS), {"adapter": ADAPTER}),
        (CONTEXT, {"ema": 0.9, "validate": True}),
        (
            mesh(4, context=2, tensor=2, sequence_parallel=False),
            {"optimizer": "armature.optim.muon.Muon", "optimizer_args": {}},
        ),
    ],
    ids=["adapters, biases, weighted norms of heads", "moving average", "Muon"],
)
def test_a_variant_trains_as_one_process_does(job, changes):
    assert_same(replace(job, **changes))


# ---------------------------------------------------------------- calls of the model
def called(kind: str, context: int) -> tuple[float, dict[str, Any]]:
    """Return a training loss and the gradients, of a loss that the caller computes."""
    model = decoder_on_meta(**DECODER)
    parallelize(model, axes={"context": context}, seed=5)
    ids = torch.randint(96, (2, 17), generator=torch.Generator().manual_seed(3))
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    targets[0, :11] = -100
    if kind == "outputs":
        outputs = model(inputs)
        assert outputs.shape == (2, 16, 96)
        value = F.cross_entropy(outputs[:, ::3].flatten(0, 1), targets[:, ::3].flatten())
    else:
        document_BT = torch.arange(16).div(5, rounding_mode="floor").expand(2, -1)
        value = model(inputs, targets, documents=document_BT)
    value.backward()
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return value.item(), {name: whole(grad).numpy() for name, grad in grads.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["outputs", "documents"])
def test_losses_that_the_caller_computes_have_the_gradients_of_one_process(kind):
    ((value, grads),) = on_ranks(called, kind, 1, ranks=1)
    for other, others in on_ranks(called, kind, 2, ranks=2):
        assert other == pytest.approx(value, rel=1e-5)
        assert others.keys() == grads.keys()
        for name, grad in grads.items():
            np.testing.assert_allclose(others[name], grad, rtol=1e-4, atol=1e-6)


def raised(length: int) -> str:
    model = decoder_on_meta(**DECODER)
    parallelize(model, axes={"context": 2})
    try:
        model(torch.zeros(2, length, dtype=torch.long))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_named():
    message = (
        "strategy.context=2 does not divide the 15 positions (dim 1) of a batch of shape (2, 15)"
    )
    assert all(message in found for found in on_ranks(raised, 15, ranks=2))


def drawn() -> tuple[list[float], float]:
    model = decoder_on_meta(**{**DECODER, "dropout": 0.5, "layers": 1})
    seen: list[float] = []
    model.blocks["0"].register_forward_hook(
        lambda _, args, out: seen.append(float((out == args[0]).sum()))
    )
    parallelize(model, axes={"context": 2})
    randomness.begin(seed=0, stream=0)
    model(torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, dtype=torch.long))
    model(torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, dtype=torch.long))
    return seen, torch.rand(()).item()


@pytest.mark.slow
def test_positions_have_their_own_dropout_and_code_around_the_model_draws_the_same():
    (first, outside), (second, other) = on_ranks(drawn, ranks=2)
    torch.manual_seed(0)
    assert outside == other
    assert len({*first, *second}) > 2, (first, second)


# ---------------------------------------------------------------- before launch
def test_a_plan_whose_context_does_not_fit_the_model_is_refused():
    sizes = {"pipe": 1, "replicate": 1, "shard": 1, "context": 2, "tensor": 1}

    def problems(make: Callable[[], nn.Module], context: dict[str, str]) -> list[str]:
        return plan_check.problems(make, replace(PLAN, context=context), sizes)

    def decoder() -> Decoder:
        return Decoder(**DECODER)

    def normalized() -> Decoder:
        model = decoder()
        model.blocks["0"].register_module("batch_norm", nn.BatchNorm1d(4))
        return model

    assert problems(decoder, dict(PLAN.context)) == []
    (found,) = problems(decoder, {"embed": "part", "blocks.*.mixer": "heads"})
    assert "context pattern 'blocks.*.mixer' matches no module of Decoder" in found
    (found,) = problems(decoder, {"embed": "part", "blocks.*.attention": "heads"})
    assert "modules without weights, but blocks.0.attention has some" in found
    (found,) = problems(normalized, dict(PLAN.context))
    assert "strategy.context=2: Decoder has BatchNorm" in found
    with pytest.raises(ValueError, match=r"plan.py: .* no context style 'ring'"):
        replace(PLAN, context={"embed": "ring"})
