"""What ranks need of each other grows with their number, not with its square."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import armature

SIZES = (16, 32, 64)
LARGEST_POWER = 1.2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_bytes_and_connections_grow_with_the_number_of_ranks():
    script = Path(__file__).with_name("scale_ranks.py")
    command = [sys.executable, str(script), *map(str, SIZES)]
    variables = {"PYTHONPATH": str(Path(armature.__file__).parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=os.environ | variables
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *by_size, of_store = map(json.loads, done.stdout.splitlines())
    assert [each["ranks"] for each in by_size] == [*SIZES]
    first, last = by_size[0], by_size[-1]
    for name in ("start", "vote", "save", "sockets"):
        power = math.log(last[name] / first[name], SIZES[-1] / SIZES[0])
        assert power < LARGEST_POWER, f"{name}: N^{power:.2f} in {by_size}"
    assert last["build"] == 0  # the mesh of one axis is the default group
    assert of_store["connections"] <= SIZES[-1] + 1
