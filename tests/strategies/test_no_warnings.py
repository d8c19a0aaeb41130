"""A normal run of any strategy prints no warning: of Lightning's, torch's, or another library's."""

import pytest

pytestmark = pytest.mark.slow
STRATEGIES = {
    "single": 1,
    "ddp": 2,
    "fsdp": 2,
    "tensor": 2,
    "pipeline": 2,
    "hsdp": 4,
    "fsdp_tensor": 4,
    "fsdp_pipeline": 4,
    "mesh": 4,
    "context": 2,
    "expert": 2,
    "3d": 8,
    "deepspeed": 2,
    "deepspeed_zero3": 2,
}
NEEDS = {
    "context": ["strategy.min_num_params=0"],
    "expert": ["model=mixture_nano", "model.experts=4", "model.heads=2"],
    "mesh": ["strategy.replicate=2", "strategy.tensor=2"],
}


def warnings(strategy, ranks, train, folder, **how) -> list[str]:
    words = [
        f"strategy={strategy}",
        "trainer.max_steps=3",
        "run.name=run",
        "model.layers=4",
        "model.tied=false",
    ]
    result = train(*words, *NEEDS.get(strategy, []), ranks=ranks, **how)
    logs = "".join(
        file.read_text() for file in (folder / "outputs" / "run" / "logs").glob("rank_*.log")
    )
    return [
        line for line in (result.stdout + result.stderr + logs).splitlines() if "Warning" in line
    ]


@pytest.mark.parametrize(("strategy", "ranks"), STRATEGIES.items(), ids=STRATEGIES)
def test_a_run_prints_no_warning(strategy, ranks, train, tmp_path):
    assert warnings(strategy, ranks, train, tmp_path) == []


def test_a_run_prints_no_warning_that_python_hides_by_default_either(train, tmp_path):
    assert warnings("fsdp", 2, train, tmp_path, fork=False, PYTHONWARNINGS="default") == []
