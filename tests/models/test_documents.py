"""FlexAttention's block mask equals the dense mask. tests/gpu tests its kernels."""

import sys

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from armature.models.decoder import documents
from armature.models.decoder.model import Decoder
from armature.parallel import blocks

# torch's tracing reads .grad of tensors that are not leaves
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
SIZES = {
    "vocab_size": 97,
    "context": 300,
    "width": 32,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "document_token": 0,
}


@pytest.fixture
def flex(monkeypatch):
    """Take the path of GPUs, with torch's reference formula for the kernels. torch has no backward
    for it on CPUs.
    """
    monkeypatch.setattr(documents, "skips_blocks", lambda device, head_dim: True)
    monkeypatch.setattr(documents, "compiled", lambda: torch_flex.flex_attention)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *args: None)
    monkeypatch.setattr(
        torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True
    )  # otherwise it compiles itself


def decoder(**changes) -> Decoder:
    torch.manual_seed(0)
    return Decoder(**{**SIZES, **changes})


def packed(rows: int = 2, length: int = 300, every: float = 60) -> torch.Tensor:
    ids = torch.randint(1, 97, (rows, length + 1))
    ids[torch.rand(ids.shape) < 1 / every] = 0
    return ids


@pytest.mark.parametrize(
    ("length", "changes"),
    [
        (7, {}),
        (128, {}),
        (300, {}),
        (300, {"windows": 40}),
        (300, {"windows": [150, None], "document_token": None}),
    ],
)
def test_losses_and_gradients_equal_those_of_the_dense_mask(flex, monkeypatch, length, changes):
    ids = packed(length=length)
    found = []
    for skips in (True, False):
        monkeypatch.setattr(documents, "skips_blocks", lambda device, head_dim, skips=skips: skips)
        model = decoder(**changes)
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        found.append([loss, *(param.grad for param in model.parameters())])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("document_token", [None, 0])
@pytest.mark.parametrize("skips", [True, False])
def test_a_piece_of_the_positions_attends_as_in_the_whole(flex, monkeypatch, skips, document_token):
    """As under a context axis that gathers keys."""
    model, ids = decoder(windows=40, document_token=document_token), packed(length=256)[:, :256]
    core, rotary = model.blocks["0"].attention.core, model.rotary(device="cpu")
    monkeypatch.setattr(documents, "skips_blocks", lambda device, head_dim: skips)
    mask = None if document_token is None else model.within_documents(ids, None)[40]
    q, k, v = torch.randn(3, 2, 2, 256, 16)
    whole = core(q, k, v, rotary, mask)
    for start in range(0, 256, 64):
        seen = slice(start + 64)
        piece = core(q[:, :, start : start + 64], k[:, :, seen], v[:, :, seen], rotary, mask)
        torch.testing.assert_close(piece, whole[:, :, start : start + 64])


def test_selective_recomputation_keeps_attention(flex, monkeypatch):
    inner, calls, ids = (
        sys.modules["torch._higher_order_ops.flex_attention"],
        [],
        packed(length=20, every=5),
    )
    formula = inner.math_attention
    monkeypatch.setattr(inner, "math_attention", lambda *args: (calls.append(1), formula(*args))[1])
    for mode, computed in (("none", 2), ("every", 4), ("selective", 2), ("half", 2)):
        model = decoder()
        blocks.checkpoint_activations(model.blocks.values(), mode=mode)
        model(ids[:, :-1], ids[:, 1:]).backward()
        assert len(calls) == computed, mode
        calls.clear()
