"""What a mesh keeps and sends of activations: never all logits, no gathered positions, 16 bits
under autocast.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.building import decoder_on_meta, parallelize
from tests.support.parity.harness import DECODER, LAYOUTS, Job, _fit, mesh, on_ranks

pytestmark = pytest.mark.slow

MODEL = {**DECODER, "layers": 3}
FUNCTIONAL = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


class Collectives(TorchDispatchMode):
    """Records (name, dtype) of the tensor axis's collectives on activations (B, T, D), and what
    holds their results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, torch.dtype]] = []
        self.gathered: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # dispatched again as its collectives
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if func.namespace == "_c10d_functional" and name in FUNCTIONAL and result.ndim == 3:
            self.sent.append((name, result.dtype))
            if name == "all_gather_into_tensor":
                storage = result.untyped_storage()
                self.gathered.append((StorageWeakRef(storage), storage.nbytes()))
        return result


def step(
    mode: str, precision: torch.dtype | None
) -> tuple[list[tuple[str, torch.dtype]], int, int, float]:
    """Return a step's collectives, how many of them are the forward's, the gathered bytes kept, and
    the loss.
    """
    norm = F.rms_norm

    def as_on_a_gpu(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        y = norm(x, *args, **kwargs)
        return y.float() if torch.is_autocast_enabled("cpu") else y

    F.rms_norm = as_on_a_gpu
    model = decoder_on_meta(**MODEL)
    parallelize(model, axes={"tensor": 2}, activation_checkpointing=mode)
    ids = torch.arange(2 * 17).view(2, 17)
    with Collectives() as seen:
        with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
            loss = model(ids[:, :-1], ids[:, 1:])
        forward = len(seen.sent)
        kept = sum(size for storage, size in seen.gathered if not storage.expired())
        loss.backward()
    return seen.sent, forward, kept, loss.item()


def test_a_tensor_axis_sends_16_bits_although_cuda_computes_norms_in_fp32():
    sent, forward, _, _ = on_ranks(step, "none", torch.bfloat16, ranks=2)[0]
    gathers = [dtype for name, dtype in sent[:forward] if name == "all_gather_into_tensor"]
    assert (
        gathers == [torch.bfloat16] * 7
    )  # into attention and feed-forward of three blocks, and into the head
    # of the embedding's rows, which autocast leaves alone, forward and backward
    assert Counter(dtype for _, dtype in sent)[torch.float32] == 2, sent


def test_selective_recomputation_keeps_no_gathered_positions():
    sent, forward, kept, loss = on_ranks(step, "selective", None, ranks=2)[0]
    plain, plain_forward, _, plain_loss = on_ranks(step, "none", None, ranks=2)[0]
    assert (kept, loss) == (0, plain_loss)
    assert sent[:forward] == plain[:plain_forward]
    extra = Counter(name for name, _ in sent[forward:]) - Counter(
        name for name, _ in plain[plain_forward:]
    )
    assert extra == {"all_gather_into_tensor": 6}


def fit_without_logits(job: Job) -> list[int]:
    """Return the sizes of what ranks have gathered to compute with, in elements, after a fit that
    makes no logits.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("all logits were made")

    F.cross_entropy = refuse  # pyright: ignore[reportAttributeAccessIssue]
    gathered, gather = [], _fsdp_param_group.foreach_all_gather

    def count(params: Any, *args: Any) -> Any:
        gathered.append(sum(param._orig_size.numel() for param in params))
        return gather(params, *args)

    _fsdp_param_group.foreach_all_gather = count
    _fit(job)
    return gathered


@pytest.mark.parametrize("tied", [False, True])
def test_sharded_training_and_validation_make_no_logits_and_gather_the_head_once(
    tied,
):
    job = replace(mesh(2, shard=2), steps=2, accumulate=1, validate=True)
    gathered = on_ranks(
        fit_without_logits, replace(job, model_args={**MODEL, "tied": tied}), ranks=2
    )[0]
    batches = 2 + 2 * (24 // 2 // 4)  # of training, and of validation and test
    embedding = batches + 2  # once more in backward, unless it is the head
    assert Counter(gathered)[96 * 32] == batches + (0 if tied else embedding), Counter(gathered)


@pytest.mark.parametrize("name", ["tensor 2", "fsdp 2 × tensor 2"])
def test_a_tensor_axis_makes_no_logits_in_training_and_validation(name):
    job = replace(LAYOUTS[name], steps=1, accumulate=1, validate=True)
    on_ranks(fit_without_logits, job, ranks=job.ranks)
