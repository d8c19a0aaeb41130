"""scripts/plan.py, in this process and by formulas alone."""

import argparse
import re
from types import ModuleType

import pytest
from hydra.core.global_hydra import GlobalHydra

from armature import cli, hardware
from armature.errors import ConfigError
from armature.planning import ranking
from armature.validation import checks
from tests import in_process
from tests.planning.test_auto import GPT2, LLAMA_1B, LLAMA_8B

RUN = ["model=llama3_8b", "data=synthetic", "optimizer=adamw"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return in_process.load("plan")


@pytest.fixture
def plan(script: ModuleType):
    return lambda *words: in_process.call(script, *words)[1]


def layouts(text: str) -> list[str]:
    return re.findall(r"^(\S.*?) {2,}\d+ +\d+ (?:none|selective|every)", text, re.MULTILINE)


def test_layouts_are_ranked_with_the_command_of_the_first(plan):
    out = plan(*RUN, "hardware=h100_80gb", "trainer.devices=8", "--quick")
    found = layouts(out)
    assert len(found) >= 10
    assert found[0] == "fsdp 8"
    assert found[-1] == "ddp"
    assert (
        "python train.py model=llama3_8b data=synthetic optimizer=adamw strategy=fsdp "
        "strategy.activation" in out
    )
    assert re.search(r"^ddp .* does not fit$", out, re.MULTILINE)


def test_an_open_number_of_gpus_is_answered_for_each(plan, monkeypatch):
    monkeypatch.setattr(ranking, "COUNTS", (1, 2, 4))
    out = plan("model=llama2_7b", "data=synthetic", "hardware=h100_80gb", "--quick")
    counts = [
        int(n)
        for n in re.findall(r"^\S.*? {2,}(\d+) +\d+ (?:none|selective|every)", out, re.MULTILINE)
    ]
    assert counts == [1, 2, 2, 2, 4, 4, 4]
    assert re.search(r"^single .* does not fit$", out, re.MULTILINE)
    commands = re.findall(
        r"^  python train.py model=llama2_7b .*trainer.devices=(\d)$", out, re.MULTILINE
    )
    assert commands == ["2", "4"]


def test_gpus_without_bfloat16_are_planned_in_fp32_and_the_faster_type_is_named(plan):
    words = ("model=gpt2_124m", "data=synthetic", "hardware=v100", "trainer.devices=1", "--quick")
    line = "Type trainer.precision=16-mixed for products that are 8 × as fast"
    assert line in plan(*words)
    assert line not in plan(*words, "trainer.precision=16-mixed")
    assert line not in plan(*words, "trainer.precision=32-true")


def test_a_batch_that_does_not_divide_is_named_once_in_the_command(plan):
    words = ("model=llama3_1b", "data=synthetic", "data.global_batch_size=64", "hardware=h100_80gb")
    (command,) = re.findall(
        r"^  python train.py .*$", plan(*words, "trainer.devices=5", "--quick"), re.MULTILINE
    )
    assert re.findall(r"data.global_batch_size=\d+", command) == ["data.global_batch_size=65"]


def test_a_mixtures_experts_may_be_spread_over_the_gpus_of_a_machine(plan):
    words = (
        "model=qwen3_30b_a3b",
        "data=synthetic",
        "optimizer=adamw",
        "hardware=h100_80gb",
        "--quick",
    )
    out = plan(*words, "trainer.devices=8")
    assert {"fsdp 8", "fsdp 8, expert 2", "fsdp 8, expert 4", "fsdp 8, expert 8"} <= set(
        layouts(out)
    )
    assert "All experts are taken to get equally many tokens." in out
    out = plan(*words, "trainer.devices=8", "trainer.num_nodes=2")
    assert {"fsdp 16, expert 8", "hsdp 2 × 8, expert 8"} <= set(layouts(out))


def test_adapters_are_named_where_full_training_does_not_fit(plan):
    words = ("model=llama2_7b", "data=synthetic", "optimizer=adamw", "--quick")
    assert "plan again with task=lora" in plan(*words, "hardware=l40s", "trainer.devices=1")
    assert "task=lora" not in plan(*words, "hardware=h100_80gb", "trainer.devices=8")


def test_adapters_are_planned(plan):
    adapted = (
        "model=llama3_8b",
        "task=lora",
        "data=synthetic",
        "optimizer=adamw",
        "hardware=h100_80gb",
        "--quick",
    )
    for words in ((), ("task.adapter.quantize=nf4",)):
        out = plan(*adapted, *words, "trainer.devices=8")
        assert {"ddp", "fsdp 8"} <= set(layouts(out))
        assert "ZeRO" not in "".join(layouts(out))
        assert "python train.py model=llama3_8b task=lora data=synthetic" in out
    assert "There is no formula" in plan(*adapted, "task.adapter.targets=[q]", "trainer.devices=8")


def test_for_a_model_of_wide_blocks_on_several_machines_a_tensor_axis_comes_first(plan):
    out = plan(
        "experiment=llama3_70b",
        "data.path=x",
        "hardware=h100_80gb",
        "trainer.devices=8",
        "trainer.num_nodes=8",
        "--quick",
    )
    assert re.match(r"fsdp \d+ × tensor \d+", layouts(out)[0])
    assert "70,553,706,496 parameters on h100_80gb: 141.1 GB of weights in 16 bits" in out


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ([], "Type hardware=NAME, of a100_40gb"),
        (["model=nope"], "2 problems:\n  - hardware: a value is required."),
        (
            ["hardware=t4", "trainer.devices=8"],
            "hardware=t4 has 4. Type trainer.devices=4 trainer.num_nodes=2",
        ),
        (
            ["hardware=t4", "trainer.devices=none"],
            "trainer.devices=none: type a whole number from 1",
        ),
        (
            ["hardware=t4", "sweep=lr"],
            "sweep=lr: here it has no effect. Leave it out; python train.py -m sweep=lr",
        ),
        (
            ["hardware=t4", "model=example", "task=example", "data=example"],
            "no file cost.py beside the model",
        ),
        (
            ["hardware=t4", "strategy.activation_checkpointing=banana"],
            "must be one of none, every, half, selective, or",
        ),
    ],
)
def test_bad_input_is_refused_with_what_to_type(plan, words, answer):
    out = plan(*(RUN if "model=example" not in words else []), *words, "--quick")
    assert "problem" in out
    assert answer in out


def test_a_model_that_needs_more_devices_is_told_how_many(plan):
    out = plan(
        "experiment=llama3_70b", "data.path=x", "hardware=rtx4090", "trainer.devices=1", "--quick"
    )
    assert "Nothing of these fits." in out
    assert re.search(r"It fits on \d+ GPUs\.", out)


def test_the_printed_command_can_be_pasted(script):
    typed = [
        "data.path=/my data",
        "+strategy.timeout=3",
        "strategy=ddp",
        "strategy.compile=block",
        "hardware=t4",
    ]
    options = argparse.Namespace(config_dir="my configs")
    assert script.kept_words(options, [*typed, "trainer.devices=8", "trainer.max_steps=5"]) == (
        "--config-dir 'my configs' 'data.path=/my data' strategy.compile=block trainer.max_steps=5"
    )


@pytest.mark.slow
def test_the_best_layouts_are_simulated(plan):
    small = (
        "model=gpt_nano",
        "model.layers=2",
        "model.width=64",
        "model.heads=4",
        "data=synthetic",
        "data.context=32",
    )
    out = plan(*small, "optimizer=adamw", "hardware=h100_80gb", "trainer.devices=4")
    assert len(layouts(out)) >= 10
    assert (
        len(re.findall(r"^\S.*?\* +4 +\d+ (?:none|selective|every)", out, re.MULTILINE))
        == ranking.SIMULATED
    ), out
    assert "* simulated; all others by closed formulas" in out


PLANNED = [  # overrides, hardware, devices, machines
    (GPT2, "rtx4090", 3, 1),
    ([*LLAMA_1B, "trainer.precision=16-mixed"], "v100", 6, 1),
    (LLAMA_8B, "a100_40gb", 4, 3),
    (["model=qwen3_30b_a3b", "data=synthetic"], "h100_80gb", 8, 1),  # with Muon, the default
    ([], "cpu", 2, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("typed", "name", "gpus", "nodes"), PLANNED)
def test_every_layout_that_is_offered_passes_the_checks_before_launch(
    script, typed, name, gpus, nodes, monkeypatch
):
    GlobalHydra.instance().clear()
    cfg, device = script.composed([*typed, f"hardware={name}"])
    runs, _ = ranking.rank(cfg, device, [(gpus, nodes)], fixed=ranking.Fixed())
    assert len(runs) >= 2
    monkeypatch.setattr(hardware, "gpu_count", lambda: 0 if name == "cpu" else gpus)
    monkeypatch.setattr(hardware, "gpu_memory_bytes", lambda: device.memory_bytes)
    monkeypatch.setattr(hardware, "bf16_is_fast", lambda *_: device.precision == "bf16-mixed")
    found: dict[str, list[str]] = {}
    for each in runs:
        command = [*typed, *each.words.replace("HOST:PORT", "node1:29500").split()]
        GlobalHydra.instance().clear()
        try:
            checks.check(cli.compose(command), open_data=False, prepare=False, overrides=command)
        except ConfigError as error:  # DeepSpeed need not be installed here
            problems = [each for each in error.problems if "deepspeed is not installed" not in each]
            found |= {each.words: problems} if problems else {}
    assert found == {}
