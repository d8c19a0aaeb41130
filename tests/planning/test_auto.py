"""What strategy=auto chooses, with GPUs that are not here: the memory of one is an argument."""

from collections.abc import Iterator

import pytest
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from armature.errors import ConfigError
from armature.layout import Layout
from armature.planning import auto, devices, memory, setup
from armature.validation import checks
from armature.validation.composing import composing
from tests.sampled import sampled

DATA = [
    "data=tokens",
    "data.path=x",
    "data.source.vocab_size=128256",
    "data.context=8192",
    "data.global_batch_size=8",
]
LLAMA_1B = ["model=llama3_1b", "optimizer=adamw", *DATA]
LLAMA_7B = ["model=llama2_7b", "optimizer=adamw", *DATA, "data.context=4096"]
LLAMA_8B, LLAMA_70B = (
    ["experiment=llama3_8b", "data.path=x"],
    ["experiment=llama3_70b", "data.path=x"],
)
GPT2 = ["experiment=gpt2_124m", "data.path=x"]


@pytest.fixture(autouse=True)
def _hydra() -> Iterator[None]:
    with composing():
        yield
    GlobalHydra.instance().clear()


def run(overrides: list[str], hardware: str, gpus: int) -> tuple[DictConfig, int]:
    """Return the configuration of a run on so many devices, and the memory of one."""
    device = devices.named(hardware)
    on, nodes = min(gpus, device.devices_per_machine), -(-gpus // device.devices_per_machine)
    counts = [f"trainer.devices={on}", f"trainer.num_nodes={nodes}"]
    precision = "32-true" if device.accelerator == "cpu" else "bf16-mixed"
    cfg = compose(
        "train", [*overrides, *counts, "trainer.accelerator=cpu", f"trainer.precision={precision}"]
    )
    cfg = checks.decide(cfg)
    cfg.trainer.accelerator = device.accelerator
    return cfg, device.memory_bytes


def chosen(overrides: list[str], hardware: str, gpus: int) -> tuple[str, str]:
    """Return the layout that auto chooses with its recomputation, and what is said."""
    cfg, memory_bytes = run(overrides, hardware, gpus)
    cfg, line = auto.decide(cfg, memory_bytes=memory_bytes, problems=checks.layout_problems)
    assert line is not None
    layout = Layout.of(cfg)
    axes = [f"{axis} {size}" for axis, size in layout.axes.items() if size > 1]
    return " ".join([layout.kind, *axes, cfg.strategy.activation_checkpointing]), line


ADAPTED = [*LLAMA_8B, "task=lora", "data.global_batch_size=1"]


@pytest.mark.parametrize(
    ("overrides", "hardware", "gpus", "layout"),
    sampled(
        [
            (ADAPTED, "h100_80gb", 1, "single every"),
            (
                [*ADAPTED, "task.adapter.quantize=nf4", "strategy.compile=none"],
                "a100_40gb",
                1,
                "single every",
            ),
            (GPT2, "h100_80gb", 1, "single none"),
            (GPT2, "h100_80gb", 8, "ddp none"),
            # ddp would need 37.5 of 39.4 GiB, less room than the formulas are exact: fsdp
            (LLAMA_1B, "a100_40gb", 8, "mesh shard 8 none"),
            (LLAMA_7B, "h100_80gb", 8, "mesh shard 8 none"),
            (LLAMA_8B, "h100_80gb", 8, "mesh shard 8 every"),
            (LLAMA_8B, "h100_80gb", 64, "mesh shard 64 none"),
            (LLAMA_70B, "h100_80gb", 64, "mesh shard 8 tensor 8 every"),
            (LLAMA_70B, "h100_80gb", 256, "mesh shard 32 tensor 8 none"),
            ([], "cpu", 1, "single none"),
            ([], "cpu", 2, "ddp none"),
        ],
        6,
    ),
)
def test_auto_takes_the_simplest_strategy_that_fits(overrides, hardware, gpus, layout):
    found, line = chosen(overrides, hardware, gpus)
    assert found == layout, line
    assert line.startswith("strategy=auto: ")
    assert "GiB" in line


def test_unknown_memory_keeps_the_rule():
    cfg, _ = run(LLAMA_8B, "h100_80gb", 8)
    kept, line = auto.decide(cfg, memory_bytes=None, problems=checks.layout_problems)
    assert (kept, line) == (cfg, "strategy=auto: ddp, since the memory of the device is unknown.")


def test_a_sample_is_as_long_as_the_data_say():
    short = [*LLAMA_1B, "data.context=256"]
    cfg, _ = run(short, "h100_80gb", 1)
    assert cfg.model.context == 8192
    found, line = chosen(short, "h100_80gb", 1)
    assert found == "single none", line


def test_what_is_not_known_is_not_refused():
    """An optimizer of unknown state, a compiled model that cannot be sharded, and options that only
    ddp has.
    """
    eight_bit = [*LLAMA_7B, "optimizer._target_=bitsandbytes.optim.AdamW8bit"]
    assert chosen(eight_bit, "h100_80gb", 1)[1].endswith(
        "since the memory of this optimizer is unknown."
    )
    found, line = chosen([*LLAMA_8B, "strategy.compile=model"], "h100_80gb", 8)
    assert found.startswith("ddp")
    assert "compile=model" in line
    found, line = chosen([*LLAMA_1B, "+strategy.find_unused_parameters=true"], "a100_40gb", 8)
    assert found == "ddp every", line


def test_a_peak_beyond_the_device_is_said_before_the_launch():
    cfg, memory_bytes = run([*LLAMA_8B, "strategy=ddp"], "h100_80gb", 8)
    found = auto.warning(cfg, Layout.of(cfg), memory_bytes=memory_bytes)
    assert found is not None
    assert "a rank needs" in found[0]
    assert "its device has 79.1 GiB (predicted, in GiB: parameters 29.9" in found[0]
    cfg, _ = run(
        [*LLAMA_8B, "strategy=fsdp", "strategy.activation_checkpointing=every"], "h100_80gb", 8
    )
    assert auto.warning(cfg, Layout.of(cfg), memory_bytes=memory_bytes) is None


SHARE_64 = ["data.global_batch_size=64", "data.micro_batch_size=auto"]


def test_auto_prefers_a_smaller_micro_batch_to_recomputation_and_sharding():
    found, line = chosen([*LLAMA_1B, *SHARE_64], "h100_80gb", 1)
    assert found == "single none", line
    found, line = chosen([*LLAMA_1B, *SHARE_64, "data.micro_batch_size=64"], "h100_80gb", 1)
    assert found == "single every", line


def test_a_micro_batch_of_auto_begins_with_what_fits():
    cfg, memory_bytes = run([*LLAMA_1B, *SHARE_64, "strategy=ddp"], "h100_80gb", 8)
    found = auto.micro_batch_size(cfg, Layout.of(cfg), memory_bytes=memory_bytes)
    assert found is not None
    size, line = found
    assert line.startswith(
        f"data.micro_batch_size=auto: {size} of the 8 samples that a rank has per step, which "
        "needs "
    )
    peaks = []
    for micro in (size, 2 * size):
        cfg.data.micro_batch_size = micro
        peaks.append(memory.peak(setup.setup_of(cfg, Layout.of(cfg))).total_bytes)
    assert peaks[0] <= 0.9 * memory_bytes < peaks[1]
    cfg.data.micro_batch_size = size
    assert auto.micro_batch_size(cfg, Layout.of(cfg), memory_bytes=memory_bytes) is None  # typed
    cfg.data.micro_batch_size = "auto"
    assert auto.micro_batch_size(cfg, Layout.of(cfg), memory_bytes=None) is None
    assert (
        auto.micro_batch_size(cfg, Layout.of(cfg), memory_bytes=100 * memory_bytes) is None
    )  # the whole share fits


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (LLAMA_7B, r"79.1 GiB. strategy=deepspeed_zero3_offload keeps"),
        ([*LLAMA_7B, "optimizer=muon"], "optimizer=adamw strategy=deepspeed_zero3_offload keeps"),
    ],
)
def test_what_the_optimizers_step_alone_exceeds_is_refused_with_a_remedy_that_works(
    overrides, remedy
):
    """Muon's state of 7B takes 76.3 GiB, and its step 2.4 GiB more, beside the context."""
    with pytest.raises(ConfigError, match=f"in the optimizer's step, .* {remedy}"):
        chosen(overrides, "h100_80gb", 1)
    cfg, _ = run(overrides, "cpu", 1)  # whose memory is the host's
    with pytest.raises(ConfigError, match=r"one has 16.0 GiB. python scripts/plan"):
        auto.decide(cfg, memory_bytes=2**34, problems=checks.layout_problems)
