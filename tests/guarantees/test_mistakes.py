"""Sentence 4: all mistakes of a command in one message, within seconds, before anything starts.

What makes seconds of it is what a mistake does not import and does not start: that is held here.
"""

import re
import subprocess

import pytest

from tests import running
from tests.guarantees.runs import command

pytestmark = [pytest.mark.guarantee, pytest.mark.slow]
EXIT_REFUSED = 2
SEVERAL = {
    "keys, options and values": (
        [
            "trainer.devces=2",
            "strategy=fspd",
            "trainer.max_steps=many",
            "model.witdh=3",
            "optimizer.lr=-1",
        ],
        ["'trainer.devices'", "'fsdp'", "trainer.max_steps=many", "'model.width'", "lr=-1"],
        {"torch", "numpy", "lightning", "transformers"},
    ),
    "values and classes": (
        [
            "experiment=example",
            "optimizer.lr=-1",
            "model.width=wide",
            "+callbacks.x._target_=lightning.pytorch.callbacks.EarlyStoping",
        ],
        ["optimizer.lr=-1", "model.width=wide", "callbacks.EarlyStoping"],
        {"transformers", "deepspeed"},
    ),
    "combinations": (
        ["strategy=tensor", "trainer.devices=3", "model.heads=5"],
        ["model.heads=5 does not divide model.width=256", "strategy.tensor=3 does not divide"],
        {"transformers", "deepspeed"},
    ),
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_all_mistakes_are_in_one_message_before_anything_starts(kind, tmp_path):
    typed, words, never_imported = SEVERAL[kind]
    process = subprocess.run(
        command(*typed),
        cwd=tmp_path,
        env={**running.environment(), "PYTHONPROFILEIMPORTTIME": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    lines = process.stderr.splitlines()
    times = [line for line in lines if line.startswith("import time:")]
    message = process.stdout + "\n".join(line for line in lines if line not in times)
    imported = {re.split(r"[|.]", line)[2].strip() for line in times}
    assert process.returncode == EXIT_REFUSED, message
    assert [word for word in words if word not in message] == [], message
    assert "Traceback" not in message
    assert not (tmp_path / "outputs").exists()
    assert "armature" in imported
    assert imported.isdisjoint(never_imported)
