"""What ranks need of each other grows with their number, not with its square."""

import json
import math
import sys

import pytest

from tests import running

SIZES = (16, 32, 64)
LARGEST_POWER = 1.2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_bytes_and_connections_grow_with_the_number_of_ranks():
    words, variables = map(str, SIZES), {"PYTHONPATH": "src", "CUDA_VISIBLE_DEVICES": ""}
    done = running.python("tests/parallel/scale_ranks.py", *words, **variables)
    *by_size, of_store = map(json.loads, done.stdout.splitlines())
    assert [each["ranks"] for each in by_size] == [*SIZES]
    first, last = by_size[0], by_size[-1]
    for name in ("start", "vote", "save", "sockets"):
        power = math.log(last[name] / first[name], SIZES[-1] / SIZES[0])
        assert power < LARGEST_POWER, f"{name}: N^{power:.2f} in {by_size}"
    assert last["build"] == 0  # the mesh of one axis is the default group
    assert of_store["connections"] <= SIZES[-1] + 1
