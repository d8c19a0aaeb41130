"""A grid whose trials are jobs of submitit, on a real Slurm."""

import csv

import pytest

from tests import running
from tests.sweeps.test_sweeps import SMALL, TRAIN


@pytest.mark.slow
def test_a_grid_runs_as_jobs_of_submitit_and_continues_by_the_same_command(slurm, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    command = [
        *TRAIN,
        "-m",
        *SMALL,
        "seed=0,1",
        "run.name=grid",
        "strategy=ddp",
        "trainer.devices=2",
        "hydra/launcher=submitit_slurm",
        "hydra.launcher.timeout_min=5",
    ]
    for _ in range(2):
        result = running.run(command, cwd=tmp_path, env=slurm.environment, timeout=180, fork=False)
        assert result.returncode == 0, result.stderr[-6000:]
        assert "2 of 2 trials finished" in result.stderr
    folder = tmp_path / "outputs" / "grid"
    with (folder / "trials.csv").open(newline="") as file:
        assert {row["step"] for row in csv.DictReader(file)} == {"8"}
    for trial in ("0", "1"):
        assert running.summary(folder / trial)["world_size"] == 2
        assert (folder / trial / "overrides.txt").read_text().count(
            "seed="
        ) == 1  # the second start had nothing to do
