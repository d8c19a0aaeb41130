"""Sentence 4: all mistakes of a command in one message, within seconds, before anything starts."""

import os
import subprocess

import pytest

from tests import running
from tests.guarantees.runs import command

pytestmark = [pytest.mark.guarantee, pytest.mark.slow]
EXIT_REFUSED = 2
SEVERAL = {
    "keys, options and values": (
        ["trainer.devces=2", "strategy=fspd", "trainer.max_steps=many", "model.witdh=3"],
        ["'trainer.devices'", "'fsdp'", "trainer.max_steps=many", "'model.width'"],
        3,
    ),
    "values and classes": (
        [
            "experiment=example",
            "optimizer.lr=-1",
            "model.width=wide",
            "+callbacks.x._target_=lightning.pytorch.callbacks.EarlyStoping",
        ],
        ["optimizer.lr=-1", "model.width='wide'", "callbacks.EarlyStoping"],
        12,
    ),
    "combinations": (
        ["experiment=example", "strategy=tensor", "trainer.devices=3", "model.layers=0"],
        ["model.layers", "strategy.tensor=3 does not divide model.width=32"],
        12,
    ),
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_all_mistakes_are_in_one_message_within_seconds(kind, tmp_path):
    """Seconds of this process on a core: those on the clock depend on what else runs."""
    typed, words, seconds = SEVERAL[kind]
    with (tmp_path / "printed").open("w") as printed:
        process = subprocess.Popen(
            command(*typed),
            cwd=tmp_path,
            env=running.environment(),
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    message = (tmp_path / "printed").read_text()
    assert process.returncode == EXIT_REFUSED, message
    assert [word for word in words if word not in message] == [], message
    assert "Traceback" not in message
    assert not (tmp_path / "outputs").exists()
    assert used.ru_utime + used.ru_stime < seconds
