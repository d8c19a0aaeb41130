"""Simulated ranks: a fixture simulates a few once, and the tests read the reports."""

import argparse

import pytest

from armature.errors import ConfigError
from armature.planning import devices, simulation
from armature.planning.roofline import Roofline
from armature.planning.simulation import processes
from armature.planning.simulation.report import Report
from scripts import simulate as command

TINY = [
    "model=gpt_nano",
    "model.layers=2",
    "model.width=64",
    "data=synthetic",
    "data.context=32",
    "optimizer=adamw",
]


def requests(*overrides: str, ranks: list[int]) -> list[simulation.Request]:
    own = any(each.startswith("model=") for each in overrides)
    cfg, device = command.composed([*(TINY[1:] if own else TINY), *overrides])
    return [simulation.Request(cfg=cfg, rank=rank, device=device) for rank in ranks]


@pytest.mark.slow
def test_a_rank_of_a_run_that_no_machine_here_could_make():
    batch = ["data.global_batch_size=512", "data.micro_batch_size=4", "model.tied=false"]
    mesh = requests("strategy=3d", "trainer.devices=8", "trainer.num_nodes=64", *batch, ranks=[511])
    wrong = requests("strategy=fsdp", "trainer.devices=3", ranks=[0])
    report, refused = simulation.simulate_all([*mesh, *wrong])
    assert isinstance(report, Report)
    assert report.world_size == 512
    assert report.fits
    assert sum(report.peak_by_kind.values()) == report.peak
    assert {volume.axis for volume in report.volumes} >= {"pipe", "shard", "tensor"}
    assert report.bubble_share > 0
    assert "rank 511" in simulation.text([report])
    assert isinstance(refused, ConfigError)
    assert any("data.global_batch_size=64" in problem for problem in refused.problems)


@pytest.mark.slow
def test_a_users_module_that_reads_values():
    own = [
        "task._target_=tests.planning.values.Module",
        "data._target_=tests.planning.values.Data",
    ]
    own += [
        "strategy=single",
        "launch.allowed_packages=[armature,torch,lightning,tests]",
        "callbacks=[ema]",
    ]
    own += ["data.global_batch_size=4", "data.micro_batch_size=4"]
    for report in simulation.simulate_all(requests(*own, ranks=[0])):
        assert isinstance(report, Report), report
        assert (
            report.flops["backward"] > 1.5 * report.flops["forward"]
        )  # all but the gradient of the first input
        assert any("masked_select" in note or "nonzero" in note for note in report.notes)


@pytest.mark.slow
def test_experts_get_equally_many_tokens():
    own = [
        "data.global_batch_size=32",
        "model.experts=8",
        "model.heads=2",
        "model.tied=false",
        "data.micro_batch_size=8",
        "trainer.devices=4",
    ]
    (request,) = requests(
        *own, "model=mixture_nano", "strategy=expert", "strategy.expert=4", ranks=[1]
    )
    (fp32,) = requests(
        *own, "model=mixture_nano", "strategy=fsdp", "trainer.precision=32-true", ranks=[1]
    )
    even, loop = simulation.simulate_all([request, fp32])
    assert isinstance(even, Report), even
    assert isinstance(loop, Report), loop
    rows = 8 * 32 * 2  # micro-batch, positions, experts per token
    (sent,) = [each for each in even.volumes if each.kind == "all_to_all" and each.bytes > 10_000]
    # there and back, forward and backward, two blocks, in 16 bits
    assert sent.bytes >= 2 * 2 * 2 * rows * 64 * 2
    assert [line for line in even.syncs if "experts.py" in line]
    assert any("equally many" in note for note in even.notes)
    assert any(
        "mixture/experts.py" in line for line in loop.syncs
    )  # a GPU's product of groups takes bf16 alone


def test_a_group_is_as_fast_as_its_slowest_link():
    device = devices.named("h100_80gb")
    roofline = Roofline(device=device, rank=0, tf32=True)
    link, network = device.link_bytes_per_second * 0.8, device.network_bytes_per_second * 0.9
    assert roofline.collective("all_gather", 8e9, range(8)) == pytest.approx(7e9 / link)
    assert roofline.collective("all_reduce", 8e9, range(0, 64, 8)) == pytest.approx(14e9 / network)
    assert roofline.collective("all_gather", 16e9, range(16)) == pytest.approx(
        15e9 / min(link, 8 * network)
    )
    assert roofline.peak("float32") == device.peak_flops["tf32"]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (
            ["data.micro_batch_size=3"],
            r"data.global_batch_size=64 is not a multiple of data.micro_batch_size=3",
        ),
        (
            ["trainer.devices=16"],
            r"trainer.devices=16: a machine of hardware=h100_80gb has 8. Type trainer.devices=8 tr",
        ),
        (["--ranks=9"], r"--ranks 9: the run has ranks 0 to 0"),
        (["--depths=0,1"], r"--depths 0,1: type numbers from 1 to model.layers="),
        (["strategy=deepspeed_zero3"], r"strategy=deepspeed: its engine is not simulated"),
        (["strategy=fsdp", "trainer.devices=8", "hardware=t4", "strategy.float8=true"], r"float8"),
    ],
)
def test_a_mistake_is_refused_before_the_simulator_starts(words, answer, monkeypatch):
    monkeypatch.setattr(
        processes, "_start_server", lambda: pytest.fail("the simulator was started")
    )
    typed = dict(word.removeprefix("--").split("=") for word in words if word.startswith("--"))
    options = argparse.Namespace(
        order=False, ranks=typed.get("ranks"), depths=typed.get("depths"), json=False
    )
    with pytest.raises(ConfigError, match=answer):
        command.run(options, [*TINY, *(word for word in words if not word.startswith("--"))])
