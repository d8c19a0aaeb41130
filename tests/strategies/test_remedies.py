"""What torch says of a strategy's limits is answered with what to type."""

import pytest

from armature.strategies.ddp import DDP
from armature.strategies.deepspeed import DeepSpeed
from armature.strategies.mesh import MeshStrategy

WHOLE = "with armature.whole_weights(self)"
CASES = {  # what torch says, and what is added
    "Expected to have finished reduction in the prior iteration before starting a new one.": (
        DDP,
        "strategy.find_unused_parameters=true",
    ),
    "aten.mm.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor": (
        MeshStrategy,
        "armature.whole_weights",
        "strategy=ddp",
    ),
    "FSDP does not support deepcopy. Please use state dict for serialization.": (
        MeshStrategy,
        "Copy it in __init__ or configure_model",
    ),
    "Can't pickle <class 'torch.distributed.fsdp._fully_shard._fsdp_init.FSDPLinear'>: it failed": (
        MeshStrategy,
        "trainer.save_checkpoint on all ranks",
    ),
    "Operator aten._fused_sgd_.default does not have a sharding strategy registered.": (
        MeshStrategy,
        "fused=True",
    ),
    "composable distributed API can only be applied to a module once": (MeshStrategy, "one module"),
    "as_strided not supported with DTensor": (MeshStrategy, WHOLE),
    "The size of tensor a (3) must match the size of tensor b (0)": (DeepSpeed, WHOLE),
    ".numpy() is not supported for tensor subclasses.": (MeshStrategy, WHOLE),
    "Attempted to access the data pointer on an invalid python storage.": (MeshStrategy, WHOLE),
}


@pytest.mark.parametrize("said", CASES)
def test_the_remedy_is_named(said):
    strategy, *remedies = CASES[said]
    error = (AssertionError if "deepcopy" in said else RuntimeError)(said)
    strategy().on_exception(error)
    assert all(remedy in str(error) for remedy in remedies)
    assert "ddp_find_unused_parameters_true" not in str(error)


def test_other_errors_stay_as_they_are():
    error = RuntimeError("another one")
    DDP().on_exception(error)
    assert str(error) == "another one"
