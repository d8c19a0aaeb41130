"""Every layout on fake GPUs: all ranks' communication meets, and the training step never waits for
the device.
"""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose

from armature.planning import devices, simulation
from armature.planning.simulation import order, processes
from armature.validation.composing import composing

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MODEL = [
    "model=gpt_nano",
    "model.tied=false",
    "model.layers=8",
    "model.width=64",
    "model.heads=4",
    "model.context=32",
    "data=synthetic",
    "data.global_batch_size=32",
    "data.micro_batch_size=4",
    "run.name=layouts",
]
MIXTURE = ["model=mixture_nano", "model.experts=8", "model.expert_hidden=32"]
EVERYTHING = ["callbacks=[ema,monitors]", "callbacks.monitors.norms_every_n_steps=1"]
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
LAYOUTS = {
    "ddp 2": ["strategy=ddp", "trainer.devices=2"],
    "fsdp 4": ["strategy=fsdp", "trainer.devices=4", "strategy.min_num_params=0"],
    "fsdp 2, muon, ema, monitors": [
        "strategy=fsdp",
        "trainer.devices=2",
        "optimizer=muon",
        *EVERYTHING,
    ],
    "hsdp 2×2": ["strategy=hsdp", "trainer.devices=4", "strategy.replicate=2", "strategy.shard=2"],
    "tensor 2": ["strategy=tensor", "trainer.devices=2"],
    "fsdp_tensor 2×2": [
        "strategy=fsdp_tensor",
        "trainer.devices=4",
        "strategy.shard=2",
        "strategy.tensor=2",
    ],
    "hsdp 2×2, muon": ["strategy=hsdp", "trainer.devices=4", "strategy.shard=2", "optimizer=muon"],
    "fsdp 2, fp16": ["strategy=fsdp", "trainer.devices=2", "trainer.precision=16-mixed"],
    "fsdp 2, offloaded": ["strategy=fsdp", "trainer.devices=2", "strategy.cpu_offload=true"],
    "fsdp_pipeline 2×2": [
        "strategy=fsdp_pipeline",
        "trainer.devices=4",
        "strategy.pipe=2",
        "strategy.shard=2",
    ],
    "fsdp_pipeline 2×2, interleaved": [
        "strategy=fsdp_pipeline",
        "trainer.devices=4",
        "strategy.pipe=2",
        "strategy.shard=2",
        "strategy.schedule=interleaved_1f1b",
    ],
    "3d 2×2×2": [
        "strategy=3d",
        "trainer.devices=8",
        "strategy.pipe=2",
        "strategy.shard=2",
        "strategy.tensor=2",
        "model.layers=2",
    ],
    "context 2×2": [
        "strategy=context",
        "trainer.devices=4",
        "strategy.shard=2",
        "strategy.min_num_params=0",
    ],
    "context 2 × tensor 2 × pipe 2": [
        "strategy=3d",
        "trainer.devices=8",
        "strategy.shard=1",
        "strategy.context=2",
        "model.layers=2",
    ],
    "mixture, ddp 2": [*MIXTURE, "strategy=ddp", "trainer.devices=2"],
    "mixture, fsdp 2, muon": [*MIXTURE, "strategy=fsdp", "trainer.devices=2", "optimizer=muon"],
    "expert 2 of fsdp 4": [
        *MIXTURE,
        "strategy=expert",
        "trainer.devices=4",
        "strategy.min_num_params=0",
    ],
    "expert 4 of fsdp 2 × tensor 2": [
        *MIXTURE,
        "strategy=fsdp_tensor",
        "strategy.expert=4",
        "trainer.devices=4",
    ],
    **{
        f"expert 2, fsdp_pipeline 2×2, {schedule}": [
            *MIXTURE,
            "strategy=fsdp_pipeline",
            "strategy.pipe=2",
            "strategy.shard=2",
            "strategy.expert=2",
            "trainer.devices=4",
            f"strategy.schedule={schedule}",
        ]
        for schedule in ("1f1b", "zero_bubble")
    },
    **{
        f"pipeline {ranks}, {schedule}": [
            "strategy=pipeline",
            f"trainer.devices={ranks}",
            f"strategy.schedule={schedule}",
            f"strategy.microbatches={2 * ranks}",  # zero_bubble needs as many
            f"data.micro_batch_size={2 * ranks}",
        ]
        for ranks in (2, 4)
        for schedule in SCHEDULES
    },
    "a classifier, pipeline 2": ["experiment=example", "strategy=pipeline", "trainer.devices=2"],
}
KNOWN_WAITS = {
    # whether a gradient overflowed
    "fp16": {"item: parallel/scaler.py: self.skipped = bool(self._unscaled.pop(optimizer))"},
    # how many rows go to each rank
    "expert": {
        "item: parallel/experts.py: return arriving_RE, *row_lengths(x_MD, leaving_RE, arriving_RE)"
    },
}


def compose_layout(*overrides: str):
    common = [] if "experiment=example" in overrides else MODEL
    with composing():
        return compose("train", [*common, *overrides])


def recorded(*overrides: str) -> list[Any]:
    cfg, device = compose_layout(*overrides), devices.named("h100_80gb")
    requests = [
        processes.Request(cfg=cfg, rank=rank, device=device, record=True)
        for rank in range(cfg.trainer.devices)
    ]
    results = simulation.simulate_all(requests)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def problems(ranks: list[Any]) -> list[str]:
    return order.problems([rank.issued for rank in ranks])


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_meet_and_do_not_wait_for_their_device(name):
    ranks = recorded(*LAYOUTS[name])
    assert all(rank.issued for rank in ranks)
    assert problems(ranks) == []
    known = {line for word, lines in KNOWN_WAITS.items() if word in name for line in lines}
    assert {with_source(wait) for rank in ranks for wait in rank.syncs} == known
    known &= KNOWN_WAITS["expert"]
    assert {with_source(wait) for rank in ranks for wait in rank.validation_syncs} == known


def with_source(wait: str) -> str:
    """Return a wait such as `item: parallel/scaler.py:89` with the text of our line in place of its
    number.
    """
    place, _, number = wait.rpartition(":")
    ending = Path(place.split(": ")[1])
    files = [path for path in (ROOT / "src").rglob(ending.name) if path.parts[-2:] == ending.parts]
    return (
        f"{place}: {files[0].read_text().splitlines()[int(number) - 1].strip()}" if files else place
    )


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (
            "LeaveOut",
            "rank 0 at planning/faults.py:15: allreduce of 12 bytes",
        ),
        (
            "SendFirst",
            "rank 1 at planning/faults.py:33: send of 12 bytes to rank 0",
        ),
    ],
)
def test_a_callback_that_would_hang_is_named(fault, line):
    overrides = [
        f"+callbacks.fault={{_target_: tests.planning.faults.{fault}}}",
        "model.layers=2",
    ]
    overrides += ["launch.allowed_packages=[armature,torch,lightning,tests]"]
    (problem,) = problems(recorded("strategy=ddp", "trainer.devices=2", *overrides))
    assert line in problem


def test_code_that_may_stop_ranks_does_not_end_a_simulation_before_its_step():
    overrides = ["+callbacks.late={_target_: tests.planning.faults.StopLate}", "model.layers=2"]
    overrides += ["launch.allowed_packages=[armature,torch,lightning,tests]"]
    assert problems(recorded("strategy=ddp", "trainer.devices=2", *overrides)) == []
