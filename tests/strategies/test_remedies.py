"""What torch says of a strategy's limits is answered with what to type."""

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from armature.strategies.ddp import DDP
from armature.strategies.deepspeed import DeepSpeed
from armature.strategies.mesh import MeshStrategy
from armature.training import errors

WHOLE = "with armature.whole_weights(self)"
CASES = {  # what torch says, and what is added
    "Expected to have finished reduction": (
        DDP,
        "strategy.find_unused_parameters=true",
        "the last",
    ),
    "a module doesn't have any parameter that requires a gradient.": (DDP, "strategy=single"),
    "got mixed torch.Tensor and DTensor": (MeshStrategy, "armature.whole_weights", "strategy=ddp"),
    "FSDP does not support deepcopy.": (MeshStrategy, "Copy it in __init__ or configure_model"),
    "_fused_sgd_ does not have a sharding strategy registered.": (MeshStrategy, "fused=True"),
    "Timed out waiting 80000ms for send operation to complete": (MeshStrategy, "to one length"),
    "The size of tensor a (3) must match the size of tensor b (0)": (DeepSpeed, WHOLE),
    "self.dim() cannot be 0 to view Float as Byte": (DeepSpeed, "torch.ones(1)"),
    ".numpy() is not supported for tensor subclasses.": (MeshStrategy, WHOLE),
    "Attempted to access the data pointer on an invalid python storage.": (MeshStrategy, WHOLE),
}


@pytest.mark.parametrize("said", CASES)
def test_the_remedy_is_named(said):
    strategy, *remedies = CASES[said]
    error = RuntimeError(said)
    strategy().on_exception(error)
    assert all(remedy in str(error) for remedy in remedies)
    assert "ddp_find_unused_parameters_true" not in str(error)


def test_other_errors_stay_as_they_are():
    error = RuntimeError("another one")
    DDP().on_exception(error)
    assert str(error) == "another one"


def test_what_lightning_refuses_has_one_too(monkeypatch):
    run: Any = SimpleNamespace(strategy=DeepSpeed())
    monkeypatch.setattr(errors, "record", lambda error: run.__setattr__("said", str(error)))
    with pytest.raises(MisconfigurationException) as caught:
        raise MisconfigurationException("only supports single optimizer")
    errors.RecordError(run).on_exception(run, run, caught.value)
    assert "strategy=fsdp" in run.said
