"""Values of a validation that ranks have logged apart are named once; reduced and equal ones are
not.
"""

import logging

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from armature.parallel import process_group
from armature.strategies.ddp import DDP
from armature.training.trainer import Trainer
from armature.training.unsynced import Unsynced
from benchmarks.parity.harness import on_ranks

pytestmark = pytest.mark.slow


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.mean = nn.Linear(1, 1), MeanMetric()

    def training_step(self, batch, batch_idx):
        return self.net(batch).mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        own = batch.mean() + process_group.rank() * dataloader_idx
        self.mean(own)
        self.log("val/own", own)
        self.log("val/equal", batch.mean())
        self.log("val/reduced", own, sync_dist=True)
        self.log("val/object", self.mean)
        self.log("val/first", own, rank_zero_only=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def told() -> list[str]:
    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    said: list[str] = []
    logging.getLogger("armature.training.unsynced").addHandler(Kept())
    data = DataLoader(torch.ones(4, 1), batch_size=2)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDP(seed=0),
        max_epochs=2,
        callbacks=[Unsynced()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Module(), data, [data, data])
    return said


def test_a_value_of_one_rank_is_named_once():
    first, second = on_ranks(told, ranks=2)
    (text,) = first
    assert "sync_dist=True: val/own/dataloader_idx_1. Each rank has" in text
    assert "(val/own/dataloader_idx_1=1 on rank 0, 2 on others)" in text
    assert text.endswith('Write self.log("val/own", …, sync_dist=True).')
    assert second == []
