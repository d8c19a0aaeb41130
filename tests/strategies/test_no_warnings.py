"""A normal run of any strategy prints no warning: of Lightning's, torch's, or another library's."""

import pytest

from tests import running

pytestmark = pytest.mark.slow
STRATEGIES = {
    "single": 1, "ddp": 2, "fsdp": 2, "tensor": 2, "pipeline": 2, "hsdp": 4, "fsdp_tensor": 4, "fsdp_pipeline": 4,
}  # fmt: skip


@pytest.mark.parametrize(("strategy", "ranks"), STRATEGIES.items(), ids=STRATEGIES)
def test_a_run_prints_no_warning(strategy, ranks, corpus, tmp_path):
    words = [f"strategy={strategy}", "trainer.max_steps=3", "run.name=run", "model.layers=4", "model.tied=false"]
    result = running.train(*words, cwd=tmp_path, corpus=corpus, ranks=ranks)
    logs = "".join(file.read_text() for file in (tmp_path / "outputs" / "run" / "logs").glob("rank_*.log"))
    lines = (result.stdout + result.stderr + logs).splitlines()
    assert not [line for line in lines if "Warning" in line]
