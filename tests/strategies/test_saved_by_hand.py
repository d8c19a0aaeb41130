"""The whole weights for a file of the user's own, under strategies that share them out."""

from pathlib import Path

import lightning.pytorch as L
import pytest
import torch

import armature
from armature.checkpoint import resume
from armature.checkpoint.state import load_full_state_dict
from tests.running import train, write_corpus


class SavesWhole(L.Callback):
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        weights = armature.full_state_dict(pl_module, prefix="model.")
        assert bool(weights) == trainer.is_global_zero
        if weights:
            torch.save(weights, Path(trainer.default_root_dir) / "whole.pt")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pipeline", "deepspeed_zero3"])
def test_whole_weights_are_those_of_the_checkpoint(strategy: str, tmp_path: Path) -> None:
    if strategy == "deepspeed_zero3":
        pytest.importorskip("deepspeed")
    train(
        f"strategy={strategy}",
        "model.tied=false",
        "model.width=384",  # DeepSpeed leaves weights of fewer than 100,000 elements whole
        "trainer.max_steps=2",
        "trainer.test_at_end=false",
        "launch.allowed_packages=[armature,torch.optim,tests]",
        "+callbacks.saves._target_=tests.strategies.test_saved_by_hand.SavesWhole",
        "run.name=run",
        cwd=tmp_path,
        corpus=write_corpus(tmp_path / "text"),
        ranks=2,
    )
    run_dir = tmp_path / "outputs" / "run"
    whole, checkpoint = torch.load(run_dir / "whole.pt"), resume.last_checkpoint(run_dir)
    assert checkpoint is not None
    saved = load_full_state_dict(checkpoint, prefix="model.")
    assert whole.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(whole[name], value), name
