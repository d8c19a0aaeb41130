"""Whether sketches of samples tell another sample from the same one."""

from uuid import uuid4

import numpy as np
import pytest
import torch

from armature.data.alike import near, sketch


def test_a_sketch_of_long_nested_lists_is_short():
    lists = [
        [[float(i * j + first) for j in range(3000)] for i in range(8)] for first in (0, 10**6)
    ]
    one, two = map(sketch, lists)
    assert len(one) < 2100
    assert near(one, sketch(lists[0]))
    assert not near(one, two)
    assert not near(one, sketch(lists[0][:-1]))


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ({"x": torch.ones(3), "id": uuid4().hex}, {"x": torch.ones(3), "id": uuid4().hex}, True),
        ({"x": torch.ones(3), "id": "a"}, {"x": torch.zeros(3), "id": "a"}, False),
        ({"text": "a fine day", "label": 1}, {"text": "a dull day", "label": 1}, False),
        ("/here/a.png", "/there/a.png", True),
        ("/here/a.png", "/here/b.png", False),
    ],
)
def test_names_count_only_if_there_are_no_numbers(one, two, same):
    assert near(sketch(one), sketch(two)) == same


@pytest.mark.parametrize(
    "make", [int, np.int64, lambda value: np.array([value]), lambda value: torch.tensor([value])]
)
def test_classes_tokens_and_times_are_compared_exactly(make):
    for one, two in ((998, 999), (1_700_000_000, 1_710_000_000), (2**60, 2**60 + 1)):
        assert near(
            sketch({"x": torch.ones(2), "y": make(one)}),
            sketch({"x": torch.ones(2), "y": make(one)}),
        )
        assert not near(
            sketch({"x": torch.ones(2), "y": make(one)}),
            sketch({"x": torch.ones(2), "y": make(two)}),
        )


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32])
def test_pixels_and_sound_may_be_rounded_otherwise(dtype):
    one, two = np.array([250, 7, 3], dtype), np.array([249, 7, 4], dtype)
    for make in (np.array, torch.tensor):
        assert near(sketch(make(one)), sketch(make(two)))
        assert not near(sketch(make(one)), sketch(make(one[::-1].copy())))
