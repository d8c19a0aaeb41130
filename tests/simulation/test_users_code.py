"""Modules of users in the simulator: reading values on a GPU is counted and said, and never ends in a traceback."""

import pytest

from armature import simulation
from armature.errors import ConfigError
from armature.simulation.report import Report
from scripts import simulate as command

DDP, FSDP = ("strategy=ddp", "trainer.devices=2"), ("strategy=fsdp", "trainer.devices=2")


def request(module: str, *overrides: str) -> simulation.Request:
    cfg, device = command.composed(
        [
            "model=vit_tiny", "data=synthetic", "data.global_batch_size=8", "data.micro_batch_size=auto",
            "optimizer=adamw", "scheduler=constant", "trainer.gradient_clip_val=null",
            f"task._target_=tests.simulation.modules.{module}",
            "launch.allowed_packages=[armature,torch,lightning,tests]", *overrides,
        ]
    )  # fmt: skip
    return simulation.Request(cfg=cfg, rank=0, device=device)


@pytest.fixture(scope="module")
def results():
    requests = {
        "single": request("ReadsValues"), "ddp": request("ReadsValues", *DDP), "fsdp": request("ReadsValues", *FSDP),
        "kernel": request("NeedsKernel"), "fails": request("FailsOnValues"),
    }  # fmt: skip
    return dict(zip(requests, simulation.simulate_all(list(requests.values())), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single", "ddp", "fsdp"])
def test_a_module_that_reads_values_is_simulated_and_each_line_that_waits_is_named(results, name):
    report = results[name]
    assert isinstance(report, Report), report
    waits = {line.split(":")[0] for line in report.syncs if "simulation/modules.py" in line}
    assert waits >= {"item", "nonzero", "unique2", "bincount", "to host"}
    (note,) = [note for note in report.notes if "largest possible" in note]
    assert "nonzero at simulation/modules.py:" in note


@pytest.mark.slow
def test_ddp_with_unused_parameters_sends_all_gradients_and_which_were_used(results):
    reduced = next(v for v in results["ddp"].volumes if v.kind == "all_reduce" and v.axis == "world")
    parameters = results["ddp"].held["parameters"]
    assert parameters < reduced.bytes < 1.5 * parameters


@pytest.mark.slow
def test_what_cannot_be_simulated_is_one_sentence_with_its_line(results):
    refused = results["kernel"]
    assert isinstance(refused, ConfigError), refused
    (sentence,) = refused.problems
    assert sentence.startswith("simulation/modules.py:")
    assert "aten::segment_reduce needs the values of a tensor" in sentence
    assert "Traceback" not in sentence


@pytest.mark.slow
def test_an_error_after_a_value_was_read_says_where(results):
    assert isinstance(results["fails"], simulation.SimulationFailed)
    assert "too few targets" in str(results["fails"])
    assert "was read instead by simulation/modules.py:" in str(results["fails"])
