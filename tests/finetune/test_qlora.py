"""Frozen weights of 4 bits: bitsandbytes' codes, the dense layer's gradients, and every layout as
one process.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from armature.checkpoint import huggingface
from armature.errors import ConfigError
from armature.finetune import nf4
from armature.finetune.lora import Lora, LoraNf4Linear
from armature.models.adapters import is_adapter
from armature.models.decoder.model import Decoder
from armature.parallel import initialization
from tests import needs
from tests.finetune import extras
from tests.finetune.folders import write_random_model
from tests.support.parity.harness import DECODER, LAYOUTS, difference, fit_once

SIZES: dict[str, Any] = {**DECODER, "width": 128, "layers": 2, "ffn_hidden": 256}
ADAPTER = {"rank": 4, "alpha": 8.0, "quantize": "nf4"}
COMPARE = """
import sys, logging, torch
logging.disable(logging.WARNING)
import bitsandbytes.functional as theirs
from armature.finetune import nf4
torch.manual_seed(0)
options = {"blocksize": 64, "quant_type": "nf4", "compress_statistics": False}
fp32 = torch.randn(48, 256) * torch.rand(48, 1)
for weight in (fp32, torch.randn(8, 128).bfloat16(), torch.zeros(2, 64)):
    expected, state = theirs.quantize_4bit(weight, **options)
    codes, scales, row = nf4.quantize(weight)
    assert torch.equal(codes.flatten(), expected.flatten())
    found = nf4.dequantize(codes, scales, row, dtype=torch.float32)
    whole = theirs.dequantize_4bit(expected, state)
    assert (found - weight).norm() <= 1.01 * (whole - weight).norm()
codes = torch.arange(256, dtype=torch.uint8).repeat(4).view(2, 512)
block_max = torch.linspace(1e-4, 3.0, 32).view(2, 16)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    found = nf4.bitsandbytes_kernel()(codes, block_max, dtype)
    assert torch.equal(found, nf4.plain_kernel(codes, block_max, dtype))
"""


@pytest.mark.slow
def test_codes_are_those_of_bitsandbytes_and_its_kernel_computes_the_same():
    needs.extra("bitsandbytes")
    extras.command("-c", COMPARE)


def test_slices_of_rows_and_columns_are_slices_of_the_whole():
    weight = torch.randn(64, 512)
    whole, largest = nf4.quantize(weight), weight.abs().amax(1, keepdim=True)
    for i, part in enumerate(zip(*(nf4.quantize(rows) for rows in weight.chunk(4)), strict=True)):
        assert torch.equal(torch.cat(part), whole[i])
    codes, scales, row = zip(
        *(nf4.quantize(part, largest=largest) for part in weight.chunk(4, dim=1)), strict=True
    )
    assert torch.equal(torch.cat(codes, dim=1), whole[0])
    assert torch.equal(torch.cat(scales, dim=1), whole[1])
    assert all(torch.equal(each, whole[2]) for each in row)


def test_values_do_not_depend_on_the_default_type():
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    expected = nf4.quantize(weight), nf4.rounded(weight)
    nf4._pairs.cache_clear()
    torch.set_default_dtype(torch.bfloat16)  # as trainer.precision=bf16-true does in each step
    try:
        found = nf4.quantize(weight), nf4.rounded(weight)
    finally:
        torch.set_default_dtype(torch.float32)
        nf4._pairs.cache_clear()
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward_are_those_of_the_dense_matrix(dtype, bias):
    linear = nf4.Nf4Linear(nn.Linear(128, 32, bias=bias)).to(dtype)
    biases = [linear.bias, copy.deepcopy(linear.bias)]
    x = torch.randn(3, 5, 128, dtype=dtype, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    y = linear(x)
    dense = nn.functional.linear(other, linear.dense(dtype), biases[1])
    upstream = torch.randn_like(y)
    y.backward(upstream)
    dense.backward(upstream)
    torch.testing.assert_close(y, dense)
    torch.testing.assert_close(x.grad, other.grad)
    if bias:
        torch.testing.assert_close(biases[0].grad, biases[1].grad)
    assert linear.row.dtype == torch.int32  # a change of the model's type rounds nothing


def test_autograd_keeps_no_dense_matrix():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        nf4.Nf4Linear(nn.Linear(256, 256))(torch.randn(2, 256, requires_grad=True))
    assert max(t.nbytes for t in kept) == 256 * 256 // 2


def adapted(**options) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(**SIZES)
    Lora(**{**ADAPTER, **options}).add_to(model)
    return model


def test_all_linears_of_the_blocks_have_4_bits_and_only_adapters_are_trained():
    model = adapted(targets=["q"])
    for i in range(2):
        assert type(model.get_submodule(f"blocks.{i}.attention.q")) is LoraNf4Linear
        assert type(model.get_submodule(f"blocks.{i}.ffn.down")) is nf4.Nf4Linear
    assert len(nf4.in_4_bits(model)) == 2 * 7
    assert all(is_adapter(name) for name, param in model.named_parameters() if param.requires_grad)
    assert model.get_parameter("head.weight").dtype == torch.float32


def test_what_cannot_be_held_is_refused():
    with pytest.raises(ConfigError, match=r"blocks\.\*\.attention\.q \(96\)"):
        Lora(**ADAPTER).add_to(Decoder(**{**SIZES, "width": 96}))


def dense_and_quantized(fill: Callable[[Decoder], None], **options: Any) -> tuple[Decoder, Decoder]:
    """Return a model in full and in 4 bits, whose Linears hold the rounded weights."""
    models = []
    for quantize in (None, "nf4"):
        with torch.device("meta"):
            model = Decoder(**SIZES, **options)
            Lora(**{**ADAPTER, "quantize": quantize}).add_to(model)
        initialization.materialize(model, device=torch.device("cpu"))
        fill(model)
        models.append(model)
    dense, quantized = models
    for name, linear in nf4.in_4_bits(quantized).items():
        weight = dense.get_parameter(f"{name}.weight").detach()
        assert torch.equal(linear.dense(), nf4.rounded(weight))
    return dense, quantized


def test_the_seeds_weights_are_quantized_as_they_are():
    begin = partial(initialization.initialize_by_name, seed=3, prefix="model.")
    dense, quantized = dense_and_quantized(begin)
    assert torch.equal(dense.get_parameter("embed.weight"), quantized.get_parameter("embed.weight"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = {
        "vocab_size": 96,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
    }
    return write_random_model(tmp_path_factory.mktemp("base"), **config, num_key_value_heads=2)


def test_a_folder_is_quantized_while_it_is_read(folder, monkeypatch):
    def read(model: Decoder) -> None:
        imported = huggingface.imported_names(model)
        assert {name for name, _ in model.named_parameters() if not is_adapter(name)} == imported
        huggingface.read(model, imported)

    monkeypatch.setattr(huggingface, "QUANTIZED_AT_ONCE", 40_000)
    dense_and_quantized(read, pretrained=str(folder))


LAYOUTS_TRIED = [
    "ddp 2",
    "fsdp 2",
    "tensor 2",
    "tensor 2, sequence parallel",
    "hsdp 2×2",
    "fsdp 2 × tensor 2",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS_TRIED)
def test_layouts_train_on_4_bits_as_one_process_does(name, folder):
    own = {"adapter": ADAPTER, "steps": 4, "model_args": {**SIZES, "pretrained": str(folder)}}
    single, run = (
        fit_once(replace(LAYOUTS["single"], **own)),
        fit_once(replace(LAYOUTS[name], **own)),
    )
    far = difference(run, single)
    assert max(far.values()) <= 1e-5, far
    assert all(
        (run.weights[n] == single.weights[n]).all() for n in single.weights if n.endswith(nf4.PARTS)
    )
