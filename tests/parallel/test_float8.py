"""Matrix products in emulated float8: the same as on a GPU, within its rounding, under every
supported strategy.
"""

import pytest
import torch

from armature.models.decoder.model import Decoder
from armature.parallel import blocks
from tests.support.parity.harness import Job, difference, fit, mesh

JOBS = {
    "ddp": Job("DDP", {"float8": "emulate"}, ranks=2),
    "fsdp, recomputed": mesh(2, shard=2, float8="emulate", activation_checkpointing="every"),
    "tensor": mesh(2, tensor=2, float8="emulate"),
    "pipeline": mesh(2, pipe=2, float8="emulate"),
    "deepspeed 3": Job("DeepSpeed", {"stage": 3, "float8": "emulate"}, ranks=2),
}


def test_only_linears_with_multiples_of_16_multiply_in_float8():
    model = Decoder(vocab_size=96, context=16, width=32, layers=1, heads=2, ffn_hidden=40)
    names = [name for name, _ in model.named_parameters()]
    blocks.convert_to_float8(model.blocks.values(), float8="emulate")
    found = {
        name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"
    }
    assert found == {f"blocks.0.attention.{name}" for name in "qkvo"}
    assert [name for name, _ in model.named_parameters()] == names
    loss = model(torch.zeros(2, 16, dtype=torch.long), torch.ones(2, 16, dtype=torch.long))
    loss.backward()
    assert all(
        param.grad is not None and param.dtype == torch.float32 for param in model.parameters()
    )


@pytest.fixture(scope="module")
def references() -> dict[bool, object]:
    return {
        on: fit(Job("SingleDevice", {"float8": "emulate"} if on else {})) for on in (True, False)
    }


@pytest.mark.slow
def test_float8_changes_the_loss_a_little(references):
    assert 1e-4 < difference(references[True], references[False])["loss"] < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_layouts_agree_within_the_rounding_of_float8(references, name):
    """Each rank scales by its own largest values, so ranks round differently."""
    far = difference(fit(JOBS[name]), references[True])
    assert far["loss"] < 1e-2, far
    assert far["weights"] < 5e-2, far
