"""Checkpoints of several ranks: what hooks see of sharded weights, files of Lightning's, and
decisions to save.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.parity.harness import QUIET, STRATEGIES, import_object, on_ranks

pytestmark = pytest.mark.slow


def loads_with_hooks(strategy: str, options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Train two steps, save, and load into a module whose first layer has another name."""
    import warnings

    import lightning as L
    import numpy as np
    import torch
    from torch import nn
    from torch.distributed.tensor import DTensor
    from torch.utils.data import DataLoader

    from armature.checkpoint import directory
    from armature.parallel import process_group

    warnings.filterwarnings("ignore")
    seen: dict[str, Any] = {}

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.save_hyperparameters({"anything": [1]})
            self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.1)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["array"] = np.arange(3.0)

    class Renamed(Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.net = self.net, None

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.body(batch).square().mean()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            weights = checkpoint["state_dict"]
            for name in [*weights]:
                weights[name.replace("net.", "body.")] = weights.pop(name)
            weights["body.2.bias"] = weights["body.2.bias"] + 1
            checkpoint["optimizer_states"] = []

    class Same(Module):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            seen["sharded"] = isinstance(checkpoint["state_dict"]["net.0.weight"], DTensor)
            seen["array"] = type(checkpoint["array"]).__name__
            checkpoint["state_dict"]["net.2.bias"] += 1

    def whole(module: nn.Module) -> dict[str, list[float]]:
        return {
            name.replace("body.", "net."): (v.full_tensor() if isinstance(v, DTensor) else v)
            .flatten()
            .tolist()
            for name, v in module.state_dict().items()
        }

    def fit(module: L.LightningModule, steps: int, ckpt: Path | None = None) -> L.Trainer:
        trainer = L.Trainer(
            **QUIET,
            devices=process_group.ranks(),
            max_steps=steps,
            max_epochs=-1,
            strategy=import_object(STRATEGIES[strategy])(**options),
        )
        trainer.fit(module, DataLoader(torch.ones(8, 8), batch_size=2), ckpt_path=ckpt)
        return trainer

    first = Module()
    trainer = fit(first, 2)
    trainer.save_checkpoint(Path(folder) / "step=000002")
    trainer.save_checkpoint(Path(folder) / "two.ckpt")
    result: dict[str, Any] = {
        "saved": whole(first),
        "is_file": directory.is_file(Path(folder) / "two.ckpt"),
    }
    for kind in (Renamed, Same):
        module = kind()
        fit(module, 2, Path(folder) / "step=000002")  # no step is left
        result[kind.__name__] = whole(module)
    again = Module()
    fit(again, 2, Path(folder) / "two.ckpt")
    return result | seen | {"again": whole(again)}


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("DDP", {}),
        ("MeshStrategy", {"shard": 2, "min_num_params": 0}),
        ("DeepSpeed", {"stage": 2}),
    ],
)
def test_hooks_change_the_weights_of_every_rank(strategy, options, tmp_path):
    for found in on_ranks(loads_with_hooks, strategy, options, str(tmp_path), ranks=2):
        changed = found["saved"] | {
            "net.2.bias": pytest.approx([value + 1 for value in found["saved"]["net.2.bias"]])
        }
        assert found["Renamed"] == changed
        assert found["Same"] == changed
        assert found["again"] == found["saved"]
        assert found["sharded"] == (strategy == "MeshStrategy")
        assert found["is_file"] == (strategy == "DDP")
        assert found["array"] == "ndarray"


def scores_of_ranks(folder: str) -> list[Any]:
    """Log a value that every rank knows otherwise."""
    from types import SimpleNamespace

    import torch

    from armature.parallel import process_group
    from tests.callbacks.test_checkpointing import Trainer, made

    callback = made(Path(folder), keep_best=1)
    found = []
    for step, score in ((1, 1.0), (2, 2.0), (3, 0.5)):
        trainer: Any = Trainer()
        trainer.global_step = trainer.completed_batches = step
        trainer.state, trainer.sanity_checking, trainer.callback_metrics = (
            SimpleNamespace(fn="fit"),
            False,
            {},
        )
        rank = process_group.rank()
        if rank == 0 or step == 3:
            trainer.callback_metrics = {"val/loss": torch.tensor(score - 10 * rank * step)}
        callback.validation_ended(trainer)
        found.append(dict(callback.scores))
    return found


def test_all_ranks_save_if_rank_0_saves(tmp_path):
    first, second = on_ranks(scores_of_ranks, str(tmp_path), ranks=2)
    assert first == [{1: 1.0}, {1: 1.0}, {1: 1.0, 3: 0.5}]
    assert [*second[-1].values()] == [1.0, 0.5]
