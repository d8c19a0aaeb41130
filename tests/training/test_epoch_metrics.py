"""What metrics have collected in an epoch continues after a resume, on the same ranks or on
others.
"""

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import nn
from torchmetrics import (
    MeanMetric,
    Metric,
    PearsonCorrCoef,
    SumMetric,
)

from armature.training import epoch_metrics


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.total = MeanMetric(), SumMetric()

    def update(self, seed: int) -> None:
        values = torch.randn(5, generator=torch.Generator().manual_seed(seed))
        self.mean.update(values)
        self.total.update(values)


def test_the_objects_of_a_validation_are_saved_as_its_end_leaves_them():
    """A save in on_validation_end comes before Lightning resets them: a resume would add the next
    validation.
    """
    module = Module()
    module.update(1)
    whole = epoch_metrics.metric_states(module)
    results = _ResultCollection(training=False)
    results.log(
        "validation_step",
        "val/mean",
        module.mean,
        on_step=False,
        on_epoch=True,
        metric_attribute="mean",
    )
    saved = epoch_metrics.metric_states(module, evaluated=results)
    assert saved["mean"]["updates"] == 0
    assert float(saved["mean"]["state"]["weight"]) == 0.0
    assert saved["total"] == whole["total"]
    assert float(module.mean.weight) > 0  # the object itself stays as it is
    results.reset()
    module.mean.update(3.0)  # by hand, later
    assert epoch_metrics.metric_states(module, evaluated=results)["mean"]["updates"] == 1


def restored(make, saved: list[dict], places: list[int], *, ranks: int) -> list:
    """Return a module for each of so many data ranks, with what ranks at these places saved."""
    modules = [make() for _ in range(ranks)]
    for rank, module in enumerate(modules):
        epoch_metrics.restore_states(
            module, saved, rank=rank, saved_data_ranks=places, data_ranks=[*range(ranks)]
        )
    return modules


def test_other_ranks_continue_with_what_all_had_collected():
    """From two data ranks, of two tensor ranks each, to three: the sums over all samples stay."""
    whole, ranks = Module(), [Module(), Module()]
    for seed in range(4):
        ranks[seed % 2].update(seed)
        whole.update(seed)
    saved = [epoch_metrics.metric_states(ranks[place]) for place in (0, 0, 1, 1)]
    resumed = restored(Module, saved, [0, 0, 1, 1], ranks=3)
    assert sum(float(module.total.sum_value) for module in resumed) == pytest.approx(
        float(whole.total.compute())
    )
    value, weight = (
        sum(float(getattr(m.mean, name)) for m in resumed) for name in ("mean_value", "weight")
    )
    assert value / weight == pytest.approx(float(whole.mean.compute()))


@pytest.mark.parametrize("after", [1, 3])
def test_a_mean_over_ranks_stays(after):
    class Level(Metric):
        def __init__(self, value: float = 0.0) -> None:
            super().__init__()
            self.add_state("level", default=torch.tensor(0.0), dist_reduce_fx="mean")
            self.level += value
            self._update_count = 1

        update, compute = (lambda self: None), (lambda self: self.level)

    saved = [epoch_metrics.metric_states(nn.ModuleList([Level(value)])) for value in (1.0, 3.0)]
    resumed = restored(lambda: nn.ModuleList([Level()]), saved, [0, 1], ranks=after)
    assert sum(float(module[0].compute()) for module in resumed) / after == pytest.approx(2.0)


class Seen(Metric):
    """A sum by a function of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state(
            "total", default=torch.tensor(0.0), dist_reduce_fx=lambda of_ranks: of_ranks.sum(0)
        )

    def update(self, x: torch.Tensor) -> None:
        self.total += x.sum()

    def compute(self) -> torch.Tensor:
        return self.total


class Correlated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.correlation, self.unused = Seen(), PearsonCorrCoef(), PearsonCorrCoef()

    def update(self, seed: int) -> None:
        x, y = torch.randn(2, 6, generator=torch.Generator().manual_seed(seed))
        self.seen.update(x)
        self.correlation.update(x, x + y)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (2, 3), (2, 2), (2, 1)])
def test_states_that_torchmetrics_stacks_or_a_function_reduces_count_once(caplog, before, after):
    whole, ranks = Correlated(), [Correlated() for _ in range(before)]
    for seed in range(4):
        whole.update(seed)
        ranks[seed % before].update(seed)
    saved = [epoch_metrics.metric_states(rank) for rank in ranks]
    resumed = restored(Correlated, saved, [*range(before)], ranks=after)
    assert sum(float(module.seen.total) for module in resumed) == pytest.approx(
        float(whole.seen.compute())
    )
    gathered = resumed[0].correlation
    for key in gathered.metric_state if after > 1 else ():
        setattr(
            gathered, key, torch.stack([getattr(module.correlation, key) for module in resumed])
        )
    if after >= before:
        assert float(gathered.compute()) == pytest.approx(float(whole.correlation.compute()))
        assert "cannot be combined" not in caplog.text
    else:
        assert caplog.text.count("cannot be combined") == 1  # nothing of `unused`
        assert "correlation: mean_x, mean_y" in caplog.text


def log(results, name, value, **settings) -> None:
    how = {"on_step": True, "on_epoch": True, "batch_size": 1, "sync_dist_fn": reduce} | settings
    results.log("training_step", name, torch.tensor(value), **how)


def reduce(value, *args, **kwargs):
    return value


def resumed_from(*ranks, rank: int = 0, now: int = 1) -> epoch_metrics.Results:
    results, places = epoch_metrics.Results(training=True), [*range(len(ranks))]
    epoch_metrics.restore(
        results, [epoch_metrics.collect(each) for each in ranks], Module(),
        SingleDeviceStrategy("cpu"), rank=rank, saved_data_ranks=places, data_ranks=[*range(now)],
    )  # fmt: skip
    return results


def test_logged_values_are_combined_over_ranks():
    ranks = [epoch_metrics.Results(training=True) for _ in range(2)]
    for results, (mean, samples, top) in zip(ranks, [(2.0, 3, 1.0), (2.5, 1, 9.0)], strict=True):
        log(results, "mean", mean, batch_size=samples)
        log(results, "top", top, reduce_fx="max")
    for now, expected in ((1, [(8.5, 4, 9.0)]), (3, [(6.0, 3, 1.0), (2.5, 1, 9.0), (0.0, 0, 9.0)])):
        for rank, values in enumerate(expected):
            resumed = resumed_from(*ranks, rank=rank, now=now)
            mean, top = resumed["training_step.mean"], resumed["training_step.top"]
            assert (mean.value, mean.cumulated_batch_size, top.value) == values


def test_a_value_continues_in_the_way_that_the_code_logs_it_now():
    """Lightning synchronizes nothing in one process, whatever `sync_dist` says."""
    stopped = epoch_metrics.Results(training=True)
    log(stopped, "loss", 2.0)
    log(stopped, "top", 2.0, reduce_fx="max")
    resumed = resumed_from(stopped)
    log(resumed, "loss", 1.0, sync_dist=True)
    log(resumed, "top", 1.0, reduce_fx="max", prog_bar=True)
    values = resumed.metrics(on_step=False)["log"]
    assert values == {"loss_epoch": 1.5, "top_epoch": 2.0}
