"""Compare two runs of a habit."""

from pathlib import Path
from typing import Any

from scripts import resume_proof

SMALL = 0.1  # norm below which weights are sums of larger values, whose rounding they keep


def assert_equal(straight: Path, resumed: Path) -> None:
    """Metrics, weights, optimizer state and random state are equal bit for bit."""
    difference, _ = resume_proof.compare(straight, resumed)
    assert difference is None, difference.text
    assert (straight / "metrics.csv").read_bytes() == (resumed / "metrics.csv").read_bytes()


def differences(
    run_dir: Path, single: Path, *, apart: tuple[str, ...] = (), bound: float = 1e-5
) -> list[str]:
    """Return what differs by more than `bound` (gradient norm: ten times that) from the run of one
    process.

    Args:
        apart: columns of metrics.csv that may differ.
    """
    columns, others = resume_proof.read(single / "metrics.csv")
    _, rows = resume_proof.read(run_dir / "metrics.csv")
    steps, other_steps = [row["step"] for row in rows], [row["step"] for row in others]
    if steps != other_steps:
        return [f"steps {steps}, in one process {other_steps}"]
    found = []
    for column in columns:
        worst, step = max(
            (_relative(row.get(column, ""), other[column]), row["step"])
            for row, other in zip(rows, others, strict=True)
        )
        allowed = 10 * bound if column == "train/grad_norm" else bound
        if worst > allowed and column not in apart:
            found.append(f"{column} by {worst:.1e} at step {step}")
    weights, expected = weights_of(run_dir), weights_of(single)
    if weights.keys() != expected.keys():
        return [*found, f"weights {sorted(weights.keys() ^ expected.keys())}"]
    for name, value in expected.items():
        own, value = (v if v.is_complex() else v.double() for v in (weights[name], value))
        relative = float((own - value).norm()) / max(float(value.norm()), SMALL)
        if relative > bound:
            found.append(f"{name} by {relative:.1e}")
    return found


def weights_of(run_dir: Path) -> dict[str, Any]:
    """Return the weights and buffers of a run's last checkpoint, by name."""
    from armature.checkpoint import resume, storage
    from armature.checkpoint import state as checkpoint

    path = resume.last_checkpoint(run_dir)
    assert path is not None
    saved = storage.read_metadata(path).state_dict_metadata
    tensors = checkpoint.load_tensors(path, saved, saved)
    return {
        name: tensor for name, tensor in tensors.items() if not name.startswith(checkpoint.RESERVED)
    }


def _relative(value: str, other: str) -> float:
    if not value or not other:
        return 0.0 if value == other else float("inf")
    one, two = float(value), float(other)
    return 0.0 if one == two else abs(one - two) / max(abs(two), 1e-12)
