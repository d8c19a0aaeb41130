"""Compare two runs of a habit."""

from pathlib import Path

from armature.proof import compare


def assert_equal(straight: Path, resumed: Path) -> None:
    """Metrics, weights, optimizer state and random state are equal bit for bit."""
    found = compare.first(compare.compare(straight, resumed, exact=True))
    assert found is None, f"step {found.step}, {found.what}"
    assert (straight / "metrics.csv").read_bytes() == (resumed / "metrics.csv").read_bytes()


def differences(run_dir: Path, single: Path, *, apart: tuple[str, ...] = ()) -> list[str]:
    """Return what differs by more than the contract allows from the run of one process.

    Args:
        apart: columns of metrics.csv that may differ.
    """
    rows, others = (
        [
            {name: value for name, value in row.items() if name not in apart}
            for row in compare.read_rows(run / "metrics.csv")
        ]
        for run in (single, run_dir)
    )
    cells = compare.compare_rows(rows, others, exact=False)
    weights, expected = compare.weights_of(run_dir), compare.weights_of(single)
    names = weights.keys() | expected.keys()
    cells["weights"] = compare.compare_tensors(expected, weights, names, bound=compare.BOUND)
    return [f"step {cell.step}, {cell.what}" for cell in cells.values() if cell.broken]
