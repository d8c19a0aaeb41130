"""Where two recorded runs part first, and the likely cause."""

import json

import pytest

from armature.callbacks.trace import sample_digests
from armature.proof.locate import locate
from armature.run_dir import TRACE

NET = {"class": "Linear", "input": [8, 1.0, 4.0], "output": [8, 2.0, 9.0]}


def record(step: int, **changes):
    piece = {"samples": ["a", "b"], "shape": "[[3]]", "targets": 2, "draws": False, "loss": 1.0}
    return {
        "step": step,
        "generators": {},
        "weights": {"net.weight": [8, 0.5, 2.0]},
        "modules": {"net": NET},
        "gradients": {"net.weight": [8, 0.1, 1.0]},
        "logged": {},
        "pieces": [piece | changes.pop("piece", {})],
    } | changes


@pytest.fixture
def write(tmp_path):
    def run(name: str, *ranks: list[dict]):
        folder = tmp_path / name / TRACE
        folder.mkdir(parents=True)
        for i, records in enumerate(ranks):
            lines = "".join(f"{json.dumps(each)}\n" for each in records)
            (folder / f"rank_{i:04}.jsonl").write_text(lines)
        return tmp_path / name

    return run


def half(value: list[float]) -> list[float]:
    return [part / 2 for part in value]


def halves(**changes):
    """The records of two ranks that share a batch."""
    net = NET | {key: half(NET[key]) for key in ("input", "output")}
    return [
        [record(1, modules={"net": net}, piece={"samples": [each]}, **changes)] for each in "ab"
    ]


def test_two_ranks_that_share_a_batch_agree_with_one_process(write):
    assert locate(write("one", [record(1)]), write("two", *halves()), exact=False) is None


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"piece": {"samples": ["a", "c"]}}, "sample 1 of 2 of the batch"),
        ({"weights": {"net.weight": [8, 0.6, 2.0]}}, "weight net.weight at the start of the step"),
        (
            {"modules": {"net": NET | {"input": [8, 1.5, 4.0], "output": [8, 2.5, 9.0]}}},
            "the input of net (Linear), which",
        ),
        ({"modules": {"net": NET | {"output": [8, 2.5, 9.0]}}}, "the output of net (Linear); its"),
        ({"gradients": {"net.weight": [8, 0.2, 1.0]}}, "the gradient of net.weight; all outputs"),
    ],
)
def test_the_first_difference_is_found_in_the_order_of_computation(write, change, where):
    one, two = [record(1), record(2)], [record(1), record(2, **change)]
    found = locate(write("one", one), write("two", two), exact=True)
    assert found is not None
    assert found.step == 2
    assert found.where.startswith(where)


def test_the_record_of_a_repeated_step_counts(write):
    wrong = record(1, modules={"net": NET | {"output": [8, 7.0, 9.0]}})
    assert locate(write("one", [record(1)]), write("two", [wrong, record(1)]), exact=True) is None


def test_a_sample_has_the_same_digest_wherever_it_is_in_a_batch():
    import torch

    x, y = torch.randn(4, 3), torch.arange(4)
    whole, shape = sample_digests({"x": x, "y": y})
    part, other = sample_digests((x[2:], y[2:]))
    assert part == whole[2:]
    assert shape == other
    assert len(set(whole)) == 4
