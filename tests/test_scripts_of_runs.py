"""What the scripts that load a run refuse before they load it."""

from pathlib import Path

import pytest
import torch

from armature.checkpoint import state
from armature.errors import ConfigError
from tests import in_process


@pytest.mark.parametrize(
    ("script", "typed", "message"),
    [
        (
            "evaluate",
            "trainer.devices=2",
            "trainer.devices=2 would change nothing here: only a training reads it",
        ),
        ("evaluate", "strategy=ddp", "strategy=ddp would change nothing"),
        ("evaluate", "data.global_batch_size=7", "data.global_batch_size=7 would change nothing"),
        ("evaluate", "run.name=x", "run.name=x would change nothing"),
        ("evaluate", "trainer.precision=32-true", "no run directory"),
        ("generate", "trainer.precision=32-true", "trainer.precision=32-true would change nothing"),
    ],
)
def test_keys_that_only_a_training_reads_are_refused(script, typed, message, tmp_path):
    code, shown = in_process.call(script, tmp_path, "--accelerator", "cpu", typed)
    assert (code, message in shown) == (2, True), shown


def test_weights_of_other_sizes_are_named():
    saved, model = torch.nn.Linear(2, 3), torch.nn.Linear(4, 3)
    with pytest.raises(ConfigError, match=r"(?s)x\.ckpt does not fit.*size mismatch for weight"):
        state.load_tensors_of(Path("x.ckpt"), model, saved.state_dict())
