"""What torch says of a strategy's limits is answered with what to type."""

import pytest

from armature.strategies.ddp import DDP
from armature.strategies.mesh import MeshStrategy


def test_the_remedy_for_unused_parameters_is_an_option_that_exists():
    error = RuntimeError(
        "Expected to have finished reduction in the prior iteration before starting a new one."
    )
    DDP().on_exception(error)
    assert "strategy.find_unused_parameters=true" in str(error)
    assert "ddp_find_unused_parameters_true" not in str(error)


def test_other_errors_stay_as_they_are():
    error = RuntimeError("another one")
    DDP().on_exception(error)
    assert str(error) == "another one"


def test_a_weight_outside_its_forward_is_explained():
    error = RuntimeError(
        "aten.mm.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor"
    )
    MeshStrategy().on_exception(error)
    assert "armature.whole_weights" in str(error)
    assert "strategy=ddp" in str(error)


def test_a_copy_of_a_sharded_module_is_explained():
    error = AssertionError(
        "FSDP does not support deepcopy. Please use state dict for serialization."
    )
    MeshStrategy().on_exception(error)
    assert "Copy it in __init__ or configure_model" in str(error)


def test_pickling_a_sharded_module_is_explained():
    error = RuntimeError(
        "Can't pickle <class 'torch.distributed.fsdp._fully_shard._fsdp_init.FSDPLinear'>: it "
        "failed"
    )
    MeshStrategy().on_exception(error)
    assert "trainer.save_checkpoint on all ranks" in str(error)


@pytest.mark.parametrize(
    "message",
    [
        "as_strided not supported with DTensor",
        ".numpy() is not supported for tensor subclasses.",
        "Attempted to access the data pointer on an invalid python storage.",
    ],
)
def test_what_a_sharded_weight_cannot_do_is_done_by_whole_ones(message):
    error = RuntimeError(message)
    MeshStrategy().on_exception(error)
    assert "with armature.whole_weights(self)" in str(error)
