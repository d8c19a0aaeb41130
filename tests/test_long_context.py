"""experiment=long_context: what a context axis is for."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import running

# of one process's data: each rank of two trains within 3,900,000, and one alone not within
# 4,900,000
LIMIT_KIB = 4_400_000
SHORT = ["data=synthetic", "trainer.max_steps=1", "trainer.limit_val_batches=0", "run.name=run"]


def limited(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python under the limit."""
    shell = ["bash", "-c", 'ulimit -d "$0" && exec "$@"', str(LIMIT_KIB), sys.executable, *words]
    return running.run(shell, cwd=cwd, env=running.environment(), timeout=600, fork=False)


def train(*overrides: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return limited(
        str(running.ROOT / "train.py"), "experiment=long_context", *SHORT, *overrides, cwd=cwd
    )


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="the limit counts private memory on Linux alone"
)
def test_under_one_limit_of_memory_one_process_fails_and_two_that_share_the_sample_train(
    tmp_path,
):
    if limited("-c", f"bytearray({LIMIT_KIB * 1024 + 1})", cwd=tmp_path).returncode == 0:
        pytest.skip("this system lets a process map more private memory than ulimit -d allows")
    (tmp_path / "one").mkdir()
    failed = train("strategy=single", "trainer.devices=1", cwd=tmp_path / "one")
    assert failed.returncode == 1
    assert "Memory ran out on rank 0" in failed.stderr
    trained = train(cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr[-6000:]
    assert "finished at step 1 " in trained.stdout + trained.stderr
