"""torch.save within a run: refused where the file would hold one rank's part; the whole weights
under any strategy.
"""

import copy
import io
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from torch import nn

import armature
from armature.checkpoint import resume
from armature.checkpoint.state import load_full_state_dict
from armature.errors import ConfigError
from armature.parallel import sharded


class SavesPart(L.Callback):
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: object
    ) -> None:
        torch.save(
            pl_module.state_dict(), Path(trainer.default_root_dir) / f"part{trainer.global_rank}.pt"
        )


class SavesWhole(L.Callback):
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        weights = armature.full_state_dict(pl_module, prefix="model.")
        assert bool(weights) == trainer.is_global_zero
        if weights:
            torch.save(weights, Path(trainer.default_root_dir) / "whole.pt")


def test_a_state_dict_of_one_rank_is_not_pickled_and_works_otherwise():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    sharded.refuse_pickled_states(module)
    torch.save(module[1].state_dict(), io.BytesIO())  # no weights
    saved = copy.deepcopy(module.state_dict())
    for state_dict in (module.state_dict(), module[0].state_dict(), {"net": saved}):
        with pytest.raises(ConfigError, match="this state dict is sharded over ranks"):
            torch.save(state_dict, io.BytesIO())
    module.load_state_dict(saved)
    zero3: nn.Module = nn.Linear(2, 2)
    sharded.refuse_pickled_states(zero3, gathers=True)
    torch.save(zero3.state_dict(), io.BytesIO())
    zero3.weight.ds_numel = 8  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ConfigError, match="this state dict is sharded over ranks"):
        torch.save(zero3.state_dict(), io.BytesIO())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pipeline", "deepspeed_zero3"])
def test_a_part_is_refused_and_the_whole_is_that_of_the_checkpoint(strategy, train, tmp_path):
    words = [
        f"strategy={strategy}",
        "model.tied=false",
        "trainer.max_steps=2",
        "trainer.test_at_end=false",
        "launch.allowed_packages=[armature,torch.optim,tests]",
    ]

    if strategy == "deepspeed_zero3":
        pytest.importorskip("deepspeed")
        words.append(
            "model.width=384"
        )  # DeepSpeed leaves weights of fewer than 100,000 elements whole

    def run(name: str, code: int) -> str:
        callback = f"+callbacks.saves._target_=tests.strategies.test_saved_by_hand.{name}"
        ended = train(*words, callback, f"run.name={name}", ranks=2, code=code)
        return ended.stdout + ended.stderr

    assert "armature.full_state_dict(self)" in run("SavesPart", 2)
    run("SavesWhole", 0)
    run_dir = tmp_path / "outputs" / "SavesWhole"
    whole, checkpoint = torch.load(run_dir / "whole.pt"), resume.last_checkpoint(run_dir)
    assert checkpoint is not None
    saved = load_full_state_dict(checkpoint, prefix="model.")
    assert whole.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(whole[name], value), name
