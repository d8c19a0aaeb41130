"""strategy.config, DeepSpeed's own entries, as the command line gives them."""

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate

from armature import config
from armature.config import CONFIGS


@pytest.mark.slow  # imports DeepSpeed
def test_typed_entries_are_merged_into_ours():
    config.register()
    GlobalHydra.instance().clear()
    typed = ["+strategy.config.zero_optimization.stage3_max_reuse_distance=0", "+strategy.config.gradient_clipping=2.0"]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIGS)):
        cfg = compose("train", ["strategy=deepspeed_zero3", "seed=3", *typed])
    entries = instantiate(cfg.strategy, seed=3).config
    assert type(entries["zero_optimization"]) is dict
    assert entries["zero_optimization"]["stage3_max_reuse_distance"] == 0
    assert entries["zero_optimization"]["stage"] == 3
    assert entries["zero_force_ds_cpu_optimizer"] is False
    assert entries["gradient_clipping"] == 2.0
