"""Compare two run directories: metrics.csv, weights, optimizer and random state."""

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

LOSS, NORM, METRICS = "loss", "grad norm", "metrics"
WEIGHTS, OPTIMIZER, RANDOM = "weights", "optimizer", "random"
COLUMNS = (LOSS, NORM, METRICS, WEIGHTS, OPTIMIZER, RANDOM)
BOUND = 1e-5  # relative, of fp32
NORM_BOUND = 1e-4  # a norm adds up the rounding of every gradient
# An element below this share of its kind's largest tensor is rounding noise, such as the gradient
# of a bias before BatchNorm.
NOISE = 1e-6
LEAST_METRIC = 1e-12  # below it, metrics are compared as if they had this size


@dataclass(frozen=True)
class Cell:
    """What one column of two runs shows.

    Attributes:
        largest: relative difference; 0.0 if all is equal bit for bit, None if nothing was compared.
        broken: whether the contract allows less.
        step: the first step that differs by more than allowed, if it is known.
        what: the first value that differs, in words.
        names: the columns of metrics.csv that differ.
    """

    largest: float | None = 0.0
    broken: bool = False
    step: int | None = None
    what: str = ""
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.largest is None:
            return "–"
        if self.broken:
            return f"DIFFERS at {self.step}" if self.step is not None else "DIFFERS"
        return "equal" if self.largest == 0 else f"{self.largest:.1e}"


NOT_COMPARED = Cell(largest=None)


def compare(reference: Path, other: Path, *, exact: bool, last_step: int | None = None) -> dict:
    """Return a Cell by column.

    Args:
        exact: equal bit for bit, random state included; else within BOUND, as layouts are.
        last_step: compare rows up to this step, and no checkpoints.
    """
    cells = compare_rows(
        read_rows(reference / "metrics.csv"),
        read_rows(other / "metrics.csv"),
        exact=exact,
        last_step=last_step,
    )
    if last_step is None:
        return cells | compare_checkpoints(reference, other, exact=exact)
    return cells | dict.fromkeys((WEIGHTS, OPTIMIZER, RANDOM), NOT_COMPARED)


def first(cells: Mapping[str, Cell]) -> Cell | None:
    """Return the broken cell of the earliest step, or None if the contract holds."""
    return min((cell for cell in cells.values() if cell.broken), key=_order, default=None)


def _order(cell: Cell) -> tuple[float, float]:
    """Return a key that puts the earliest step first, then the largest difference."""
    return math.inf if cell.step is None else cell.step, 0.0 if cell.names else -(cell.largest or 0)


def read_rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def compare_rows(
    rows: list[dict[str, str]],
    others: list[dict[str, str]],
    *,
    exact: bool,
    last_step: int | None = None,
) -> dict[str, Cell]:
    """Return the cells of the columns that metrics.csv has."""
    if last_step is not None:
        rows, others = (
            [row for row in each if int(row["step"]) <= last_step] for each in (rows, others)
        )
    steps, other_steps = ([row["step"] for row in each] for each in (rows, others))
    if steps != other_steps:
        text = f"metrics.csv has the steps {_span(other_steps)}, not {_span(steps)}"
        step = next(int(s) for s in steps + other_steps if steps.count(s) != other_steps.count(s))
        return dict.fromkeys(
            (LOSS, NORM, METRICS), Cell(math.inf, broken=True, step=step, what=text)
        )
    cells = {LOSS: NOT_COMPARED, NORM: NOT_COMPARED, METRICS: Cell()}
    names = dict.fromkeys(name for row in (*rows, *others) for name in row)
    for name in (name for name in names if name != "step"):
        kind = {"train/loss": LOSS, "train/grad_norm": NORM}.get(name, METRICS)
        values = [
            (int(row["step"]), row.get(name) or "", other.get(name) or "")
            for row, other in zip(rows, others, strict=True)
        ]
        bound = 0.0 if exact else NORM_BOUND if kind == NORM else BOUND
        cells[kind] = _worse(cells[kind], _of_column(name, values, bound))
    return cells


def _span(steps: list[str]) -> str:
    return ", ".join(steps) if len(steps) < 12 else f"{steps[0]} to {steps[-1]} ({len(steps)} rows)"


def _of_column(name: str, values: Iterable[tuple[int, str, str]], bound: float) -> Cell:
    largest, found = 0.0, None
    for step, value, other in values:
        difference = relative(value, other)
        largest = max(largest, difference)
        if difference > bound and found is None:
            text = f"{name}: {value or 'nothing'} and {other or 'nothing'}"
            found = Cell(difference, broken=True, step=step, what=text, names=(name,))
    return found or Cell(largest)


def relative(value: str, other: str) -> float:
    """Return the relative difference of two cells of metrics.csv."""
    if value == other:
        return 0.0
    if not value or not other:
        return math.inf
    try:
        one, two = float(value), float(other)
    except ValueError:
        return math.inf
    if one == two or (math.isnan(one) and math.isnan(two)):
        return 0.0
    difference = abs(one - two) / max(abs(one), abs(two), LEAST_METRIC)
    return difference if math.isfinite(difference) else math.inf


def _worse(one: Cell, two: Cell) -> Cell:
    if one.broken and two.broken:
        return replace(min(one, two, key=_order), names=one.names + two.names)
    if one.broken or two.broken:
        return one if one.broken else two
    if one.largest is None or two.largest is None:
        return two if one.largest is None else one
    return max(one, two, key=lambda cell: cell.largest or 0.0)


# ---------------------------------------------------------------- checkpoints
def compare_checkpoints(reference: Path, other: Path, *, exact: bool) -> dict[str, Cell]:
    """Return the cells of the newest checkpoints: weights with buffers, optimizer, random state."""
    from armature.checkpoint import state

    one, two = (_read(run) for run in (reference, other))
    if one is None or two is None:
        which = reference if one is None else other
        missing = Cell(math.inf, broken=True, what=f"{which.name} has no checkpoint at its end")
        return dict.fromkeys((WEIGHTS, OPTIMIZER, RANDOM), missing)
    (tensors, meta), (others, other_meta) = one, two
    bound = 0.0 if exact else BOUND
    own, its = ({n for n in each if not n.startswith(state.RESERVED)} for each in (tensors, others))
    cells = {
        WEIGHTS: compare_tensors(tensors, others, own | its, bound=bound),
        OPTIMIZER: compare_tensors(
            tensors, others, (tensors.keys() | others.keys()) - own - its, bound=10 * bound
        ),
        RANDOM: NOT_COMPARED,
    }
    if exact:
        plain = ("lr_schedulers", state.OPTIMIZER)
        found = _first_difference([{key: m.get(key) for key in plain} for m in (meta, other_meta)])
        if found:
            cells[OPTIMIZER] = _worse(cells[OPTIMIZER], Cell(math.inf, broken=True, what=found))
        found = _first_difference([m.get(state.RANDOM) for m in (meta, other_meta)])
        cells[RANDOM] = (
            Cell(math.inf, broken=True, what=f"random state{found}") if found else Cell()
        )
    return cells


def _read(run: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    from torch.utils._pytree import tree_leaves

    from armature.checkpoint import resume, state, storage

    path = resume.last_checkpoint(run)
    if path is None:
        return None
    saved = storage.read_metadata(path).state_dict_metadata
    tensors = state.load_tensors(path, saved, saved)
    for name in [name for name, value in tensors.items() if isinstance(value, bytes)]:
        leaves = tree_leaves(storage.loaded(tensors.pop(name)))  # of lists and dicts of tensors
        tensors |= {
            f"{name}/{number}": getattr(leaf, "to_dense", lambda leaf=leaf: leaf)()
            for number, leaf in enumerate(leaves)
        }
    return tensors, storage.read_meta(path)


def weights_of(run: Path) -> dict[str, Any]:
    """Return the weights and buffers of a run's newest checkpoint, by name."""
    from armature.checkpoint import state

    read = _read(run)
    assert read is not None, f"{run} has no checkpoint"
    return {name: each for name, each in read[0].items() if not name.startswith(state.RESERVED)}


def compare_tensors(
    tensors: Mapping[str, Any],
    others: Mapping[str, Any],
    names: Iterable[str],
    *,
    bound: float,
) -> Cell:
    """Return the cell of the tensor that differs most; `bound` is of the relative norm."""
    cell, largest = Cell(), _largest_norms(tensors)
    for name in sorted(names):
        if name not in tensors or name not in others:
            return Cell(math.inf, broken=True, what=f"{name} is in one checkpoint only")
        difference = _distance(tensors[name], others[name], NOISE * largest.get(_kind(name), 0.0))
        text = f"{name} at the end"
        cell = _worse(cell, Cell(difference, broken=difference > bound, what=text))
    return cell


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _largest_norms(tensors: Mapping[str, Any]) -> dict[str, float]:
    import torch

    norms: dict[str, float] = {}
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            norms[_kind(name)] = max(norms.get(_kind(name), 0.0), float(value.double().norm()))
    return norms


def _distance(value: Any, other: Any, noise: float) -> float:
    """Return the norm of the difference over the norm; 0.0 if both are equal bit for bit."""
    import torch

    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return 0.0 if bool(value == other) else math.inf
    if value.shape != other.shape:
        return math.inf
    wide = torch.complex128 if value.is_complex() else torch.float64
    one, two = value.to(wide), other.to(wide)
    if torch.equal(one, two) or bool(torch.isclose(one, two, 0, 0, equal_nan=True).all()):
        return 0.0
    difference = float((one - two).norm()) / max(float(one.norm()), noise, 1e-30)
    return difference if math.isfinite(difference) else math.inf


def _first_difference(values: list[Any], path: str = "") -> str | None:
    """Return where two trees of plain values and tensors first differ, in words, or None."""
    import torch

    one, two = values
    if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        pairs = [(f"{path}.{key}", [one[key], two[key]]) for key in one]
    elif isinstance(one, list | tuple) and isinstance(two, list | tuple) and len(one) == len(two):
        pairs = [(f"{path}[{i}]", [a, b]) for i, (a, b) in enumerate(zip(one, two, strict=True))]
    elif isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return None if torch.equal(one, two) else path
    else:
        return None if bool(one == two) else f"{path}: {one} and {two}"
    return next((f for name, pair in pairs if (f := _first_difference(pair, name))), None)
