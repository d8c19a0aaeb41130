"""Strategies, precisions and features on a GPU: `make test-gpu`."""

import json
import sys
from pathlib import Path

import pytest

from armature import hardware
from tests import running
from tests.data.chat_parts import folder, write
from tests.finetune.folders import write_random_model
from tests.gpu.on_gpu import ACCELERATOR, COMMON, GPUS, PACKAGES, needs, needs_cuda
from tests.training.test_not_finite import BAD, PARTS, bad

pytestmark = [pytest.mark.gpu, pytest.mark.slow, needs(1)]
SCRIPTS = running.ROOT / "scripts"
ON = f"trainer.accelerator={ACCELERATOR}"
FP32 = "trainer.precision=32-true"
SIXTEENS = ("model.width=64", "model.heads=4", "data.source.vocab_size=320", "data.context=32")
CASES = {  # overrides, and how far a loss may be from the reference's
    "fsdp": ([FP32, "strategy=fsdp"], 1e-3),
    "bf16-mixed": (["trainer.precision=bf16-mixed"], 2e-2),
    "bf16-true": (["trainer.precision=bf16-true"], 5e-2),
    "compiled": (["trainer.precision=bf16-mixed", "strategy.compile=block"], 2e-2),
    "recomputed": (
        ["trainer.precision=bf16-mixed", "strategy.activation_checkpointing=selective"],
        2e-2,
    ),
    "ddp": ([FP32, "strategy=ddp"], 1e-3),
    "fp16": (["trainer.precision=16-mixed"], 2e-2),
    "fp16, fsdp": (["trainer.precision=16-mixed", "strategy=fsdp"], 2e-2),
    "fsdp, offloaded": ([FP32, "strategy=fsdp", "strategy.cpu_offload=true"], 1e-3),
    "fsdp, compiled": (
        ["trainer.precision=bf16-mixed", "strategy=fsdp", "strategy.compile=block"],
        2e-2,
    ),
    "CUDA graphs": (
        [
            "trainer.precision=bf16-mixed",
            "strategy.compile=model",
            "strategy.compile_mode=reduce-overhead",
        ],
        2e-2,
    ),
    "bf16 gradients": (
        ["trainer.precision=bf16-mixed", "strategy=fsdp", "data.micro_batch_size=2"],
        2e-2,
    ),
    "average of weights, monitors": (
        [FP32, "callbacks=[ema,monitors]", "callbacks.monitors.norms_every_n_steps=1"],
        1e-3,
    ),
}


def command(*words: str | Path, code: int = 0) -> str:
    result = running.python(*words, code=code, fork=True)
    return result.stdout + result.stderr


OF_GPUS = ("fp16", "fp16, fsdp", "fsdp, offloaded")  # refused on a CPU


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[needs_cuda] * (name in OF_GPUS)) for name in CASES]
)
def test_losses_are_those_of_a_cpu(reference, tmp_path, case):
    losses, source = reference
    overrides, tolerance = CASES[case]
    running.train("run.name=other", *COMMON, ON, *overrides, cwd=tmp_path, corpus=source)
    assert running.losses(tmp_path / "outputs" / "other") == pytest.approx(losses, rel=tolerance)
    assert running.summary(tmp_path / "outputs" / "other")["peak_memory_bytes"] > 0


@needs_cuda
@pytest.mark.parametrize("strategy", ["deepspeed_zero1", "deepspeed", "deepspeed_zero3"])
def test_losses_under_deepspeed_are_those_of_a_cpu(adamw, reference, tmp_path, strategy):
    words = (*COMMON, ON, FP32, f"strategy={strategy}", "optimizer=adamw")
    running.train("run.name=other", *words, cwd=tmp_path, corpus=reference[1])
    assert running.losses(tmp_path / "outputs" / "other") == pytest.approx(adamw, rel=1e-3)


@needs_cuda
@pytest.mark.parametrize(
    ("compiled", "precision"), [("none", "bf16-true"), ("block", "bf16-mixed")]
)
def test_float8_trains_as_bf16_does(tmp_path, reference, compiled, precision):
    if (hardware.compute_capability() or (0, 0)) < (8, 9):
        pytest.skip("float8 needs a GPU of compute capability 8.9")
    words = [
        *COMMON,
        ON,
        *SIXTEENS,
        f"trainer.precision={precision}",
        f"strategy.compile={compiled}",
    ]
    for name, on in {"float8": "true", "bf16": "false"}.items():
        running.train(
            f"run.name={name}", *words, f"strategy.float8={on}", cwd=tmp_path, corpus=reference[1]
        )
    ours, plain = (running.losses(tmp_path / "outputs" / name) for name in ("float8", "bf16"))
    assert ours == pytest.approx(plain, rel=5e-2)
    assert ours != plain


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("background", ["true", "false"])
def test_a_resumed_run_is_the_same_bit_for_bit(reference, tmp_path, strategy, background):
    words = [
        *COMMON,
        ON,
        f"strategy={strategy}",
        f"checkpoint.background={background}",
        "trainer.deterministic=true",
        "checkpoint.every_n_steps=2",
    ]
    running.train("run.name=whole", *words, cwd=tmp_path, corpus=reference[1])
    running.train(
        "run.name=parts", *words, "trainer.max_steps=3", cwd=tmp_path, corpus=reference[1]
    )
    running.train("run.name=parts", *words, cwd=tmp_path, corpus=reference[1])
    whole, parts = (running.rows(tmp_path / "outputs" / name) for name in ("whole", "parts"))
    assert [row["train/loss"] for row in whole] == [row["train/loss"] for row in parts]
    assert [row["train/grad_norm"] for row in whole] == [row["train/grad_norm"] for row in parts]


@needs_cuda
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize(
    "more", [(), ("data.micro_batch_size=2",), ("optimizer=adamw", "strategy.compile=block")]
)
def test_the_host_never_waits_within_a_step(reference, tmp_path, strategy, more):
    words = [
        *COMMON[:1],
        "trainer.log_every_n_steps=100",
        "trainer.max_steps=10",
        "trainer.val_every_n_steps=10",
        ON,
        f"strategy={strategy}",
        "trainer.precision=bf16-mixed",
        PACKAGES,
        "+callbacks.no_wait={_target_:tests.gpu.on_gpu.NoWait}",
        "launch.max_restarts=0",
        *more,
    ]
    running.train("run.name=run", *words, cwd=tmp_path, corpus=reference[1])


@needs_cuda
def test_a_micro_batch_that_does_not_fit_is_made_smaller(reference, tmp_path):
    small = "+callbacks.small={_target_:tests.gpu.on_gpu.SmallGpu,gib:0.5}"
    sizes = ["data.context=512", "data.global_batch_size=64", "model.width=128", "model.heads=4"]
    words = [
        *COMMON,
        ON,
        FP32,
        "trainer.max_steps=2",
        "trainer.val_every_n_steps=null",
        *sizes,
        PACKAGES,
    ]
    source = running.write_corpus(tmp_path / "larger", files=400)
    done = running.train("run.name=auto", *words, small, cwd=tmp_path, corpus=source)
    assert "micro-batch" in done.stdout + done.stderr
    running.train("run.name=plain", *words, cwd=tmp_path, corpus=source)
    ours, plain = (running.losses(tmp_path / "outputs" / name) for name in ("auto", "plain"))
    assert ours == pytest.approx(plain, rel=1e-4)


@needs_cuda
def test_what_does_not_fit_at_all_is_said_with_what_to_type(reference, tmp_path):
    small = "+callbacks.small={_target_:tests.gpu.on_gpu.SmallGpu,gib:0.05}"
    sizes = [
        "data.context=512",
        "data.global_batch_size=4",
        "data.micro_batch_size=4",
        "model.width=512",
    ]
    words = [
        *COMMON,
        ON,
        FP32,
        "trainer.max_steps=2",
        *sizes,
        PACKAGES,
        "launch.max_restarts=0",
        small,
    ]
    source = running.write_corpus(tmp_path / "larger", files=100)
    done = running.train("run.name=run", *words, cwd=tmp_path, corpus=source, code=None)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "activations" in said
    assert "data.micro_batch_size=2" in said or "strategy.activation_checkpointing" in said


def test_a_step_that_is_not_finite_is_left_out_as_on_a_cpu(tmp_path):
    found = []
    for name, accelerator in {"cpu": "cpu", "other": ACCELERATOR}.items():
        words = [*PARTS, *bad("skip", BAD), "model.dropout=0", f"run.name={name}"]
        train = [sys.executable, str(running.ROOT / "train.py"), *words]
        line = [*train, f"trainer.accelerator={accelerator}", "trainer.matmul_precision=highest"]
        done = running.run(line, cwd=tmp_path, env=running.environment())
        assert done.returncode == 0, done.stderr[-4000:]
        found.append(running.losses(tmp_path / "outputs" / name))
    assert found[1] == pytest.approx(found[0], rel=1e-4, nan_ok=True)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    root = tmp_path_factory.mktemp("pretrained")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 320,
        "max_position_embeddings": 64,
    }
    write_random_model(root / "base", **sizes)
    folder(root / "base")
    answers = [
        {"prompt": f"how are {i}", "completion": "I am fine " * (i % 5 + 1)} for i in range(90)
    ]
    write(root / "chats.jsonl", answers)
    pairs = [
        {"prompt": f"how are {i}", "chosen": "I am fine", "rejected": "world " * (i % 3 + 1)}
        for i in range(90)
    ]
    write(root / "pairs.jsonl", pairs)
    return root


FINETUNED = {  # overrides, and how far a loss may be from a CPU's
    "whole": (["experiment=finetune", FP32], 1e-3),
    "adapters": (["experiment=finetune_lora", FP32], 1e-3),
    "adapters, fsdp, bf16": (
        ["experiment=finetune_lora", "trainer.precision=bf16-mixed", "strategy=fsdp"],
        3e-2,
    ),
    "4 bits": (["experiment=finetune_qlora", FP32], 1e-3),
    "4 bits, bf16": (["experiment=finetune_qlora", "trainer.precision=bf16-mixed"], 3e-2),
    "preferences": (["experiment=dpo", FP32], 1e-3),
}


@pytest.mark.parametrize("case", FINETUNED)
def test_fine_tuning_gives_a_cpus_losses_and_answers(pretrained, tmp_path, case):
    overrides, tolerance = FINETUNED[case]
    data = pretrained / ("pairs.jsonl" if "dpo" in overrides[0] else "chats.jsonl")
    words = [
        running.ROOT / "train.py",
        f"model.pretrained={pretrained / 'base'}",
        f"data.path={data}",
        "data.context=64",
        "data.global_batch_size=4",
        f"data.source.cache_dir={tmp_path / 'cache'}",
        "trainer.max_steps=6",
        "scheduler=constant",
        "optimizer.lr=1e-3",
        f"run.root={tmp_path}",
        "logger=none",
        "trainer.log_every_n_steps=1",
        "trainer.matmul_precision=highest",
        *overrides,
    ]
    command(*words, "run.name=cpu", "trainer.accelerator=cpu", FP32, "strategy=single")
    command(*words, "run.name=other", ON)
    ours, cpu = (running.losses(tmp_path / name) for name in ("other", "cpu"))
    assert ours == pytest.approx(cpu, rel=tolerance)
    asked = ["--chat", "--prompt", "how are 3", "--tokens", "6", "--accelerator", ACCELERATOR]
    assert "<|im_" not in command(SCRIPTS / "generate.py", tmp_path / "other", *asked)


def test_a_run_is_evaluated_predicted_and_asked_on_both_devices(reference, tmp_path):
    running.train("run.name=run", *COMMON, ON, FP32, cwd=tmp_path, corpus=reference[1])
    run, said = tmp_path / "outputs" / "run", {}
    for accelerator in (ACCELERATOR, "cpu"):
        words = ["--accelerator", accelerator]
        evaluated = command(SCRIPTS / "evaluate.py", run, "--split", "val", *words)
        asked = ["--prompt", "line 3 of", "--tokens", "12", "--temperature", "0", *words]
        said[accelerator] = (
            evaluated.count("val/loss") > 0,
            command(SCRIPTS / "generate.py", run, *asked),
        )
    assert len(set(said.values())) == 1


@needs_cuda
def test_a_gpu_is_found_and_used(reference, tmp_path):
    words = [
        *COMMON,
        "callbacks=monitors",
        "trainer.accelerator=auto",
        "trainer.precision=auto",
        "trainer.devices=auto",
    ]
    running.train("run.name=run", *words, cwd=tmp_path, corpus=reference[1])
    timings = (tmp_path / "outputs" / "run" / "timings.csv").read_text().splitlines()
    last = dict(zip(timings[0].split(","), timings[-1].split(","), strict=True))
    assert 0 < float(last["mfu"]) < 1
    assert "bf16" in (tmp_path / "outputs" / "run" / "config.yaml").read_text()


@needs_cuda
def test_the_doctor_and_the_planner_know_this_machine(reference, tmp_path):
    words = [*running.TINY[:-1], f"data.path={reference[1]}", ON, "--json"]
    done = running.call("scripts/doctor.py", *words, cwd=tmp_path, code=None)
    findings = json.loads(done.stdout)["findings"]
    wrong = [
        each
        for each in findings
        if each["level"] == "failure" and "not installed" not in each["what"]
    ]
    assert not wrong
    assert any(f"{GPUS} GPU" in each["what"] for each in findings)
    plan = command(
        SCRIPTS / "plan.py",
        "model=gpt2_124m",
        "data=synthetic",
        "hardware=this",
        "trainer.devices=1",
        "--quick",
    )
    assert "single" in plan
