"""Metric objects and sums count each sample once, whatever ranks share it, and ranks may hold
unequal numbers.
"""

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, Metric, SumMetric
from torchmetrics.classification import MulticlassAUROC
from torchmetrics.regression import NormalizedRootMeanSquaredError
from torchmetrics.text import ROUGEScore
from torchmetrics.utilities import dim_zero_cat

from armature.parallel import process_group
from armature.strategies.ddp import DDP
from armature.strategies.mesh import MeshStrategy
from tests.support.parity.harness import on_ranks
from tests.trainers import quiet_trainer

pytestmark = pytest.mark.slow
LAYOUTS = {  # ranks, data ranks, sizes of axes
    "ddp": (2, 2, {}),
    "fsdp, tensor": (4, 2, {"shard": 2, "tensor": 2}),
    "pipeline, context": (4, 1, {"shard": 1, "pipe": 2, "context": 2}),
}
SAMPLES = 5
SPLITS = {
    1: 2 * [[range(SAMPLES)]],
    2: [[range(2), range(2, SAMPLES)], [range(SAMPLES - 1), range(SAMPLES - 1, SAMPLES)]],
}  # by data ranks
CELLS = [("ddp", 0), ("ddp", 1), ("fsdp, tensor", 0), ("pipeline, context", 0)]
SCORES = torch.rand(SAMPLES, 3, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 2, 0, 1])


class Values(Metric):
    """One value per sample, in a list that nothing concatenates."""

    def __init__(self, reduction=None):
        super().__init__()
        self.add_state("values", default=[], dist_reduce_fx=reduction)

    def update(self, values):
        self.values.extend(values)

    def compute(self):
        return torch.stack([*self.values]).float()


class Pairs(Metric):
    """Two lists of the same samples, one value and one batch at a time."""

    def __init__(self):
        super().__init__()
        self.add_state("one", default=[], dist_reduce_fx="cat")
        self.add_state("batch", default=[], dist_reduce_fx="cat")

    def update(self, values):
        self.one.extend(values)
        self.batch += [values] * (len(values) > 0)

    def compute(self):
        one, batch = (dim_zero_cat(values) for values in (self.one, self.batch))
        return torch.equal(one, batch)


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.sum, self.cat, self.auroc, self.rouge = (
            SumMetric(),
            CatMetric(),
            MulticlassAUROC(3),
            rouge(),
        )
        self.values, self.stacked, self.pairs, self.found = (
            Values(),
            Values(torch.stack),
            Pairs(),
            {},
        )
        self.error = NormalizedRootMeanSquaredError(num_outputs=2)
        self.own = CatMetric(dist_sync_fn=lambda value, group: [value])

    def validation_step(self, batch, batch_idx):
        strategy = self.trainer.strategy
        own = torch.tensor(
            [*SPLITS[strategy.data_size][batch][strategy.data_rank]], dtype=torch.int64
        )
        self.sum.update(len(own))
        self.log("sum", self.sum)
        self.log("logged", float(len(own)), reduce_fx="sum", sync_dist=True)
        self.values.update(own)
        self.stacked.update(own)
        self.pairs.update(own)
        if len(own):
            self.error.update(SCORES[own, :2], SCORES[own, 1:])
        for i in own:
            self.cat.update(i)
            self.own.update(i)
            self.rouge.update(*text(i))
            self.auroc.update(SCORES[i : i + 1], CLASSES[i : i + 1])
        self.found["whole"] = int(
            self.trainer.strategy.reduce(torch.tensor(len(own)), reduce_op="sum")
        )
        self.found["mine"] = len(own)
        self.found["decided"] = [
            strategy.reduce_boolean_decision(*asked)
            for asked in (
                (True,),
                (self.global_rank == 0,),
                (self.global_rank == 0, False),
                (False, False),
            )
        ]
        self.found["places"] = self.all_gather(torch.tensor(strategy.data_rank)).tolist()

    def on_validation_epoch_end(self):
        for name in ("cat", "values", "stacked"):
            self.found[name] = sorted(getattr(self, name).compute().tolist())
        self.found["pairs"] = bool(self.pairs.compute())
        self.found["own"] = int(self.own.compute().numel()) if self.own.update_called else 0
        if self.trainer.strategy.data_size == 1:
            self.found["error"] = self.error.compute().tolist()
        self.found["auroc"] = float(self.auroc.compute())
        self.found["rouge"] = float(self.rouge.compute()["rouge1_fmeasure"])


def rouge():
    return ROUGEScore(rouge_keys="rouge1")


def text(sample):
    return ("a b" if sample % 2 else "a c"), "a b"


def measured(sizes, split):
    strategy = MeshStrategy(seed=0, **sizes) if sizes else DDP(seed=0)
    trainer = quiet_trainer(devices=process_group.ranks(), strategy=strategy)
    module = Module()
    trainer.validate(module, DataLoader([split], batch_size=None), verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()} | module.found


@pytest.mark.parametrize(("layout", "split"), CELLS)
def test_each_sample_counts_once(layout, split):
    ranks, data_ranks, sizes = LAYOUTS[layout]
    auroc, texts = MulticlassAUROC(3), rouge()
    auroc.update(SCORES, CLASSES)
    error = NormalizedRootMeanSquaredError(num_outputs=2)
    error.update(SCORES[:, :2], SCORES[:, 1:])
    for sample in range(SAMPLES):
        texts.update(*text(sample))
    expected = {
        "sum": SAMPLES, "logged": SAMPLES, "whole": SAMPLES, "auroc": float(auroc.compute()),
        "rouge": float(texts.compute()["rouge1_fmeasure"]),
    } | {name: [*range(SAMPLES)] for name in ("cat", "values", "stacked")}  # fmt: skip
    for found in on_ranks(measured, sizes, split, ranks=ranks):
        assert found.pop("places") == [*range(data_ranks)]
        assert found["decided"] == [True, False, True, False]
        assert found["pairs"]
        assert found["own"] == found["mine"]
        if data_ranks == 1:
            assert found.pop("error") == pytest.approx(error.compute().tolist())
        for name, value in expected.items():
            assert found[name] == pytest.approx(value), name
