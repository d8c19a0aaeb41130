"""Statistics over seeds and folds."""

import json

import pytest
import yaml

from armature.sweeps import repeats, trials
from tests import running


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.70620473617), (2, 4.302652729749), (4, 2.776445105198), (29, 2.045229642133)],
)
def test_quantiles_of_students_t_are_exact(freedom, expected):
    assert repeats.student_t(freedom) == pytest.approx(expected, rel=1e-11)


def write(folder, values: dict, *typed: str) -> None:
    """Write a sweep whose finished trials have these accuracies by seed and fold."""
    for number, ((seed, fold), value) in enumerate(values.items()):
        path = folder / str(number)
        path.mkdir(parents=True)
        policy = {"monitor": "val/accuracy", "mode": "max"}
        cfg = {"checkpoint": policy, "seed": seed, "data": {"fold": fold}}
        (path / "config.yaml").write_text(yaml.safe_dump(cfg))
        words = [f"seed={seed}", f"++data.fold={fold}", *typed]
        (path / "overrides.txt").write_text("\n".join(words) + "\n")
        metrics = {"train/loss": 0.1, "val/accuracy": value}
        summary = {"stop_reason": "finished", "metrics": metrics, "global_step": 9}
        (path / "summary.json").write_text(json.dumps(summary))


def test_equal_seeds_and_folds_are_compared_in_pairs(tmp_path):
    one = {(0, 0): 0.1, (0, 1): 0.2, (1, 0): 0.3}
    write(tmp_path / "a", one, "optimizer=sgd")
    write(tmp_path / "b", {(0, 1): 0.5, (1, 0): 0.7, (0, 0): 0.2, (5, 0): 0.9}, "optimizer=muon")
    result = running.call("scripts/runs.py", "compare", "a", "b", cwd=tmp_path)
    table, difference = result.stdout.split("\n\n")
    assert table.splitlines()[1].split() == ["a", "sgd", "3", "0.2", "±", "0.1"]
    assert difference.startswith("b minus a, paired by seed and fold:")
    # differences 0.1, 0.3, 0.4: 0.2667 ± 4.302653 × 0.1527525 / √3
    expected = ["val/accuracy", "+0.2667", "-0.1128", "to", "+0.6461", "3"]
    assert difference.splitlines()[-1].split() == expected


def test_a_sweep_has_a_row_per_configuration_the_best_first(tmp_path):
    write(tmp_path / "a", {(0, 0): 0.25, (1, 0): 0.75, (2, 0): None})  # NaN, as JSON has it
    sweep = trials.read(tmp_path / "a")
    assert sweep is not None
    assert repeats.averages(sweep) == [
        ["runs", "val/accuracy"],
        ["3", "0.5 ± 0.35 (2)"],
    ]
