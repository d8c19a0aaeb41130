"""A LightningModule as anybody writes one: built in its constructor, with a loss of its own that
knows no -100.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.parity.harness import STRATEGIES, import_object, on_ranks


def trained(strategy: str, options: dict[str, Any]) -> dict[str, float]:
    import warnings

    import lightning as L
    import torch
    from torch import nn
    from torch.utils.data import Dataset

    from armature.data.base import DataModule
    from armature.data.feed import Feed
    from armature.parallel import process_group

    warnings.filterwarnings("ignore")

    class Rows(Dataset):
        def __init__(self, size: int) -> None:
            self.x = torch.randn(size, 8, generator=torch.Generator().manual_seed(size))

        def __len__(self) -> int:
            return len(self.x)

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self.x[index], self.x[index].sum()

    class Data(DataModule):
        def dataset(self, split: str) -> Rows | None:
            return {"train": Rows(64), "val": Rows(37), "test": None}[split]

    class Plain(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))

        def loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.net(x).squeeze(-1), y)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", self.loss(batch), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=process_group.ranks(),
        max_epochs=2,
        logger=False,
        strategy=import_object(STRATEGIES[strategy])(**options),
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    feed = Feed(Data(), global_batch_size=16, eval_batch_size=8)
    trainer.callbacks.append(feed)  # pyright: ignore[reportAttributeAccessIssue]
    trainer.fit(Plain(), datamodule=feed.data)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["DDP", "MeshStrategy"])
def test_its_metrics_are_those_of_one_process(strategy: str) -> None:
    (alone,) = on_ranks(trained, "SingleDevice", {}, ranks=1)
    options = {"shard": 2} if strategy == "MeshStrategy" else {}
    assert set(alone) == {"val/loss"}
    for rank in on_ranks(trained, strategy, options, ranks=2):
        assert rank == pytest.approx(alone, rel=1e-5)
