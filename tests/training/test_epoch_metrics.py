"""What metrics have collected in an epoch continues after a resume, on the same ranks or on others."""

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, MinMaxMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall

from armature.training import epoch_metrics


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.total = MeanMetric(), SumMetric()
        self.extremes = MinMaxMetric(SumMetric())
        self.both = MetricCollection([MulticlassAccuracy(3, average="micro"), MulticlassRecall(3, average="micro")])

    def update(self, seed: int) -> None:
        values = torch.randn(5, generator=torch.Generator().manual_seed(seed))
        self.mean.update(values)
        self.total.update(values)
        self.extremes(values)
        self.both.update((values * 7).long().abs() % 3, torch.arange(5) % 3)

    def compute(self) -> dict[str, torch.Tensor]:
        return {
            "mean": self.mean.compute(),
            "sum": self.total.compute(),
            **self.extremes.compute(),
            **self.both.compute(),
        }


def same(rank: int = 0) -> dict:
    return {"rank": rank, "saved_data_ranks": [0], "data_ranks": [0]}


def test_metric_objects_continue_bit_for_bit():
    straight, stopped, resumed = Module(), Module(), Module()
    for seed in range(4):
        straight.update(seed)
    for seed in range(2):
        stopped.update(seed)
    epoch_metrics.restore_states(resumed, [epoch_metrics.metric_states(stopped)], **same())
    for seed in (2, 3):
        resumed.update(seed)
    assert {k: float(v) for k, v in straight.compute().items()} == {k: float(v) for k, v in resumed.compute().items()}


def test_a_save_leaves_metric_objects_as_they_are():
    saved, plain = Module(), Module()
    for seed in range(4):
        for module in (saved, plain):
            module.update(seed)
        epoch_metrics.metric_states(saved)
    assert {k: float(v) for k, v in saved.compute().items()} == {k: float(v) for k, v in plain.compute().items()}


def test_other_ranks_continue_with_what_all_had_collected():
    """From two data ranks, of two tensor ranks each, to three: the sums over all samples stay."""
    whole, ranks = Module(), [Module(), Module()]
    for seed in range(4):
        ranks[seed % 2].update(seed)
        whole.update(seed)
    saved = [epoch_metrics.metric_states(ranks[place]) for place in (0, 0, 1, 1)]
    resumed = [Module() for _ in range(3)]
    for rank, module in enumerate(resumed):
        epoch_metrics.restore_states(module, saved, rank=rank, saved_data_ranks=[0, 0, 1, 1], data_ranks=[0, 1, 2])
    assert sum(float(module.total.sum_value) for module in resumed) == pytest.approx(float(whole.total.compute()))
    value, weight = (sum(float(getattr(m.mean, name)) for m in resumed) for name in ("mean_value", "weight"))
    assert value / weight == pytest.approx(float(whole.mean.compute()))


def test_logged_values_are_combined_over_ranks():
    logged = [
        {
            "mean": {"reduce_fx": "mean", "value": 6.0, "samples": 3},
            "top": {"reduce_fx": "max", "value": 1.0, "samples": 0},
        },
        {
            "mean": {"reduce_fx": "mean", "value": 2.0, "samples": 1},
            "top": {"reduce_fx": "max", "value": 9.0, "samples": 0},
        },
    ]
    first, second = (
        epoch_metrics.for_rank(logged, rank=rank, saved_data_ranks=[0, 1], data_ranks=[0, 1, 2]) for rank in (0, 1)
    )
    assert (first["mean"]["value"], first["mean"]["samples"]) == (8.0, 4)
    assert (second["mean"]["value"], second["mean"]["samples"]) == (0.0, 0)
    assert first["top"]["value"] == second["top"]["value"] == 9.0


def test_a_metric_that_the_module_lacks_is_named(caplog):
    epoch_metrics.restore_states(nn.Module(), [epoch_metrics.metric_states(Module())], **same())
    assert "both.MulticlassAccuracy" in caplog.text
