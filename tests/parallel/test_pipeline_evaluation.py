"""Evaluation through a pipeline: outputs equal to those of the whole model; its loss."""

import os

import pytest
import torch

from armature.models.decoder.model import Decoder
from armature.parallel import initialization
from armature.parallel.split import SCHEDULES
from tests.parallel.building import decoder_on_meta, parallelize
from tests.support.parity.harness import DECODER, on_ranks

pytestmark = pytest.mark.slow

EVERY = {**SCHEDULES, "4 stages each": SCHEDULES["interleaved_1f1b"]._replace(stages_per_rank=4)}


def unsharded(**changes: int) -> Decoder:
    model = decoder_on_meta(**DECODER | changes)
    names = initialization.materialize(model, device=torch.device("cpu"))
    initialization.initialize_by_name(model, seed=0, names=names)
    return model


def outputs(model, batches: list[int]) -> list[torch.Tensor]:
    found = []
    for size in batches:
        tokens = torch.randint(0, 96, (size, 16), generator=torch.Generator().manual_seed(size))
        with torch.no_grad():
            found += [model.eval()(tokens), model(tokens, tokens.roll(-1, 1))]
    return found


def evaluate(ranks: int, batches: list[int]) -> dict[str, float]:
    """Return the largest difference from the whole model, by schedule."""
    expected, far = outputs(unsharded(layers=16), batches), {}
    for name, schedule in EVERY.items():
        model = decoder_on_meta(**DECODER | {"layers": 16})
        parallelize(
            model,
            axes={"pipe": ranks},
            prefix="",
            schedule=schedule,
            microbatches=4,
            reshard_after_forward=False,
        )
        got = outputs(model, batches)
        far[name] = max(float((a - b).abs().max()) for a, b in zip(got, expected, strict=True))
    return far


def test_every_schedule_evaluates_as_the_whole_model_does():
    for far in on_ranks(evaluate, 4, [6, 7, 3, 1, 7], ranks=4):
        assert set(far) == set(EVERY)
        assert max(far.values()) < 1e-5, far


def unequal_batches() -> tuple[float, list[float]]:
    """Return how far outputs and losses are from the whole model's, where data ranks' batches
    differ in shape.
    """
    whole, model = unsharded(), decoder_on_meta(**DECODER)
    parallelize(
        model, axes={"pipe": 2, "shard": 2}, prefix="", microbatches=4, reshard_after_forward=False
    )
    tokens = torch.randint(0, 96, (9, 16), generator=torch.Generator().manual_seed(0))
    data_rank, far = int(os.environ["RANK"]) % 2, []
    own = tokens.split([5, 4])[data_rank]
    with torch.no_grad():
        outputs = float((model.eval()(own) - whole.eval()(own)).abs().max())
    model.train()
    for lengths in (
        (16, 16),
        (16, 12),
        (12, 16),
    ):  # known on both, new on one, known by the other one only
        x = tokens[:4, : lengths[data_rank]]
        loss = model(x, x.roll(-1, 1))
        loss.backward()
        far.append(abs(float(loss.detach() - whole(x, x.roll(-1, 1)).detach())))
    return outputs, far


def test_data_ranks_with_batches_of_other_shapes_meet():
    for outputs, losses in on_ranks(unequal_batches, ranks=4, timeout=60):
        assert outputs < 1e-5
        assert max(losses) < 1e-5


def chunked_losses() -> dict[str, int]:
    """Return how often a training step computed its loss without holding all the logits on this
    rank, by schedule.
    """
    from armature.models.decoder import loss

    found, compute, counted = {}, loss.chunked_loss, []
    loss.chunked_loss = lambda *args, **kwargs: (counted.append(1), compute(*args, **kwargs))[1]
    tokens = torch.randint(0, DECODER["vocab_size"], (4, DECODER["context"]))
    for schedule in ("1f1b", "interleaved_1f1b"):
        model = decoder_on_meta(**DECODER)
        parallelize(
            model,
            axes={"pipe": 2},
            prefix="",
            schedule=SCHEDULES[schedule],
            microbatches=2,
            reshard_after_forward=False,
        )
        model(tokens, tokens).backward()
        counted.clear()  # of the pass in which torch finds shapes
        model(tokens, tokens).backward()
        found[schedule] = len(counted)
    return found


def test_a_last_stage_alone_on_its_rank_computes_the_loss_in_chunks():
    assert on_ranks(chunked_losses, ranks=2) == [
        {"1f1b": 0, "interleaved_1f1b": 0}, {"1f1b": 2, "interleaved_1f1b": 0}
    ]  # fmt: skip
