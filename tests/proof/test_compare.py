"""What differs between two run directories, and by how much."""

import math

import pytest
import torch

from armature.proof import compare

ROWS = [
    {"step": "1", "train/loss": "5.5", "train/grad_norm": "2.0", "val/acc": ""},
    {"step": "2", "train/loss": "5.25", "train/grad_norm": "1.0", "val/acc": "0.5"},
]


def changed(step: int, name: str, value: str) -> list[dict[str, str]]:
    return [row | {name: value} if row["step"] == str(step) else row for row in ROWS]


def test_equal_rows_are_equal_bit_for_bit():
    cells = compare.compare_rows(ROWS, ROWS, exact=True)
    assert {str(cell) for cell in cells.values()} == {"equal"}
    assert compare.first(cells) is None


@pytest.mark.parametrize(
    ("others", "column", "step", "what"),
    [
        (changed(2, "train/loss", "5.26"), compare.LOSS, 2, "train/loss: 5.25 and 5.26"),
        (changed(1, "train/grad_norm", "2.1"), compare.NORM, 1, "train/grad_norm: 2.0 and 2.1"),
        (changed(2, "val/acc", ""), compare.METRICS, 2, "val/acc: 0.5 and nothing"),
        (ROWS[:1], compare.LOSS, 2, "metrics.csv has the steps 1, not 1, 2"),
        ([*ROWS, ROWS[1]], compare.LOSS, 2, "metrics.csv has the steps 1, 2, 2, not 1, 2"),
    ],
)
@pytest.mark.parametrize("exact", [True, False])
def test_the_first_difference_is_named_with_step_and_values(others, column, step, what, exact):
    cells = compare.compare_rows(ROWS, others, exact=exact)
    assert cells[column].broken
    first = compare.first(cells)
    assert first is not None
    assert (first.step, first.what) == (step, what)


def test_layouts_may_differ_by_rounding_but_a_resume_may_not():
    others = changed(2, "train/loss", "5.25001")
    assert compare.compare_rows(ROWS, others, exact=True)[compare.LOSS].broken
    cell = compare.compare_rows(ROWS, others, exact=False)[compare.LOSS]
    assert not cell.broken
    assert str(cell) == "1.9e-06"


def test_a_metric_that_becomes_nan_differs():
    others = changed(2, "val/acc", "nan")
    assert compare.compare_rows(ROWS, others, exact=False)[compare.METRICS].largest == math.inf
    assert not compare.first(compare.compare_rows(others, others, exact=False))


def test_rows_are_compared_up_to_a_step():
    others = changed(2, "train/loss", "9")
    assert compare.first(compare.compare_rows(ROWS, others, exact=True, last_step=1)) is None


def test_the_tensor_that_differs_most_is_named():
    one = {"a.weight": torch.ones(2), "b.weight": torch.ones(2)}
    two = {"a.weight": torch.ones(2) + 1e-3, "b.weight": torch.ones(2) + 0.5}
    cell = compare.compare_tensors(one, two, one, bound=1e-5)
    assert cell.broken
    assert cell.what == "b.weight at the end"


def test_a_tensor_of_rounding_noise_is_measured_against_the_largest_of_its_kind():
    """Adam's average of a gradient that is zero but for rounding: a bias before BatchNorm."""
    one = {"a.exp_avg": torch.ones(100), "b.exp_avg": torch.full((1,), 1e-9)}
    two = {"a.exp_avg": torch.ones(100), "b.exp_avg": torch.full((1,), -1e-9)}
    assert not compare.compare_tensors(one, two, one, bound=1e-3).broken


def test_a_tensor_of_one_checkpoint_alone_is_a_difference():
    cell = compare.compare_tensors({"a": torch.ones(1)}, {}, ["a"], bound=1.0)
    assert cell.what == "a is in one checkpoint only"
