"""strategy.config, DeepSpeed's own entries, as the command line gives them."""

import pytest
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch.plugins import DeepSpeedPrecision

from armature.layout import Layout
from armature.validation import combinations
from armature.validation.composing import composing, instantiate


@pytest.mark.slow  # imports DeepSpeed
def test_typed_entries_are_merged_into_ours():
    GlobalHydra.instance().clear()
    typed = [
        "strategy=deepspeed_zero3",
        "seed=3",
        "+strategy.config.zero_optimization.stage3_max_reuse_distance=0",
        "+strategy.config.wall_clock_breakdown=true",
    ]
    with composing():
        cfg = compose("train", typed)
    entries = instantiate(cfg.strategy, seed=3).config
    zero = entries["zero_optimization"]
    assert type(zero) is dict
    assert zero["stage3_max_reuse_distance"] == 0
    assert zero["stage"] == 3
    assert entries["zero_force_ds_cpu_optimizer"] is False
    assert entries["wall_clock_breakdown"] is True


@pytest.mark.slow  # imports DeepSpeed
def test_typed_entries_of_16_bits_leave_them_on():
    from armature.strategies.deepspeed import DeepSpeed

    strategy = DeepSpeed(config={"bf16": {"check_grad_overflow": True}})
    strategy.precision_plugin = DeepSpeedPrecision("bf16-mixed")
    strategy._format_config()
    assert strategy.config["bf16"] == {"enabled": True, "check_grad_overflow": True}


def test_entries_that_our_options_decide_are_refused():
    def problems(given):
        axes = {"world_size": 2, "data_ranks": 2, "axes": {}, "plan": None}
        layout = Layout(kind="deepspeed", options={"config": given}, **axes)
        return [*combinations._of_deepspeed(combinations.Run({}, layout))]

    [clipping] = problems({"gradient_clipping": 2.0})
    assert "strategy.config.gradient_clipping: an option of armature's decides it. Type" in clipping
    [stage] = problems({"zero_optimization": {"stage": 3}})
    assert "strategy.config.zero_optimization.stage: an option of armature's" in stage
    [optimizer] = problems({"optimizer": {"type": "Adam"}})
    assert "Type optimizer=" in optimizer
    assert problems(None) == []
