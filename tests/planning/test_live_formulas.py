"""The formulas beside runs that are simulated now, so that neither can drift from the other in
silence.
"""

import pytest

from armature.layout import Layout
from armature.planning import memory, seconds, simulation
from armature.planning.setup import setup_of
from scripts import simulate as command

MODEL = [
    "model=llama3_8b",
    "model.layers=2",
    "data=synthetic",
    "data.context=2048",
    "optimizer=adamw",
]
CASES = {
    "single": [
        "strategy=single",
        "trainer.devices=1",
        "data.global_batch_size=2",
        "data.micro_batch_size=1",
    ],
    "ddp": ["strategy=ddp", "data.global_batch_size=8"],
    "fsdp": ["strategy=fsdp", "data.global_batch_size=16", "data.micro_batch_size=1"],
    "hsdp": [
        "strategy=hsdp",
        "strategy.shard=4",
        "strategy.activation_checkpointing=every",
        "data.global_batch_size=8",
    ],
    "fsdp, fp32 reduced in fp64": [
        "strategy=fsdp",
        "trainer.precision=32-true",
        "strategy.reduce_dtype=float64",
        "strategy.activation_checkpointing=half",
        "data.global_batch_size=8",
    ],
    "tensor": [
        "strategy=tensor",
        "strategy.activation_checkpointing=selective",
        "data.global_batch_size=2",
    ],
    "fsdp_tensor": [
        "strategy=fsdp_tensor",
        "strategy.tensor=4",
        "callbacks=[ema]",
        "data.global_batch_size=8",
    ],
}


@pytest.mark.slow
def test_memory_is_within_a_tenth_of_the_simulators_and_communication_equal():
    requests, setups = [], []
    for overrides in CASES.values():
        devices = [] if "trainer.devices=1" in overrides else ["trainer.devices=8"]
        cfg, device = command.composed([*MODEL, *devices, *overrides, "hardware=h100_80gb"])
        requests.append(simulation.Request(cfg=cfg, rank=0, device=device))
        there = cfg.copy()
        there.trainer.accelerator = "gpu"
        if there.trainer.precision == "auto":
            there.trainer.precision = device.precision
        setups.append(setup_of(there, Layout.of(there)))
    for name, setup, report in zip(CASES, setups, simulation.simulate_all(requests), strict=True):
        assert isinstance(report, simulation.Report), (name, report)
        assert memory.peak(setup).allocated_bytes == pytest.approx(report.peak, rel=0.1), name
        sent = seconds.step_seconds(setup, requests[0].device).communication
        assert sent == pytest.approx(report.communication_seconds, rel=0.01), name
