"""Runs of the command line, loss by loss, against transformers' Trainer on the same batches; with
adapters, peft's.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from armature import loading, run_dir
from armature.data import feed
from armature.models.adapters import is_adapter
from armature.models.decoder.names import theirs
from armature.parallel import initialization
from tests import needs, running
from tests.data import chat_parts
from tests.finetune import extras, trainer_reference
from tests.finetune.folders import write_random_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STEPS, ROWS, MICRO = 8, 4, 2
NEAR = 1e-5
JOBS = {  # experiment, model, packed rows, more overrides
    "adapters, llama": ("finetune_lora", "llama", False),
    "adapters, qwen3, packed": ("finetune_lora", "qwen3", True),
    "all weights, llama, packed": ("finetune", "llama", True),
    "all weights, qwen3": ("finetune", "qwen3", False),
}
SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
MODELS = {
    "llama": {},
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "tie_word_embeddings": True,
    },
}
RATES = {"finetune_lora": 1e-2, "finetune": 1e-3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The run directory of each job, and the losses that the Trainer made of the same batches."""
    needs.extra("transformers")
    root = tmp_path_factory.mktemp("trainer")
    for name, changes in MODELS.items():
        write_random_model(root / name, **SIZES, **changes)
        chat_parts.folder(root / name)
    chats = [
        {"prompt": "how are " * (i % 4 + 1) + str(i), "completion": "I am fine " * (i % 5 + 1)}
        for i in range(200)
    ]
    chat_parts.write(root / "chats.jsonl", chats)
    found = {}
    for name, job in JOBS.items():
        run = train(root, *job)
        found[name] = run, extras.call(trainer_reference.train, job_of(run, packed=job[2]))
    return found


def train(
    root: Path, experiment: str, model: str, packed: bool, *more: str, ranks: int = 1
) -> Path:
    """Train, and return the run directory."""
    own = dict(word.split("=", 1) for word in more)
    name = own.get("run.name", f"{experiment}-{model}")
    words = [
        f"experiment={experiment}",
        f"model.pretrained={root / model}",
        f"data.path={root / 'chats.jsonl'}",
        f"data.source.packing={str(packed).lower()}",
        "data.source.val_fraction=0",
        "data.context=64",
        f"data.global_batch_size={ROWS}",
        f"data.micro_batch_size={MICRO}",
        f"data.source.cache_dir={root / 'cache'}",
        f"optimizer.lr={RATES[experiment]}",
        "optimizer.eps=1e-6",
        "scheduler=constant",
        "scheduler.warmup=0",
        f"trainer.max_steps={STEPS}",
        "trainer.max_epochs=null",
        "trainer.test_at_end=false",
        "trainer.accelerator=cpu",
        "trainer.precision=32-true",
        "trainer.gradient_clip_val=1.0",
        f"run.root={root}",
        f"run.name={name}",
        "logger=none",
        *([] if "strategy" in own else ["strategy=single"]),
        *more,
    ]
    result = running.call("train.py", *words, cwd=root, ranks=ranks)
    assert ranks > 1 or f"next: python scripts/generate.py {root / name} --chat" in result.stderr
    return root / name


def job_of(run: Path, *, packed: bool) -> dict[str, Any]:
    """Write the batches that the run was trained on and the adapters that it started from, for the
    reference.
    """
    cfg = run_dir.read(run)
    fed = feed.build(cfg)
    fed.data.prepare_data()
    batches = [
        batch for _, batch in zip(range(STEPS * ROWS // MICRO), fed.train_loader(), strict=False)
    ]
    joined = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    assert ("documents" in joined) == packed
    counts = (joined["targets"] != -100).sum(dim=1).view(-1, MICRO).sum(dim=1)
    assert (counts.view(STEPS, -1).diff() != 0).any(), (
        "each micro-batch has as many targets: normalization is unseen"
    )
    save_file(joined, run / "batches.safetensors")
    job = {
        "base": cfg.model.pretrained,
        "batches": str(run / "batches.safetensors"),
        "micro_batch": MICRO,
        "accumulate": ROWS // MICRO,
        "lr": cfg.optimizer.lr,
        "eps": cfg.optimizer.eps,
        "clip": 1.0,
        "lora": None,
        "start": str(run / "start.safetensors"),
        "out": str(run / "trainer"),
    }
    if "adapter" in cfg.task:
        save_file(first_adapters(cfg), job["start"])
        lora = {
            "r": cfg.task.adapter.rank,
            "lora_alpha": cfg.task.adapter.alpha,
            "target_modules": "all-linear",
        }
        job["lora"] = lora
    return job


def first_adapters(cfg) -> dict[str, torch.Tensor]:
    """Return the matrices that a run's adapters start from, under peft's names."""
    task = loading.build_task(cfg)
    task.configure_model()
    model = task.get_submodule("model")
    initialization.materialize(model, device=torch.device("cpu"))
    names = {name for name, _ in model.named_parameters() if is_adapter(name)}
    initialization.initialize_by_name(model, seed=cfg.seed, names=names, prefix="model.")
    found = {}
    for name in names:
        owner, _, part = name.rpartition(".")
        module = str(theirs(f"{owner}.weight")).removesuffix(".weight")
        found[f"base_model.model.{module}.{part}.weight"] = (
            model.get_parameter(name).detach().clone()
        )
    return found


@pytest.mark.parametrize("name", JOBS)
def test_each_step_has_the_loss_of_transformers_trainer(runs, name):
    run, expected = runs[name]
    losses = running.losses(run)
    assert len(losses) == STEPS
    assert losses[0] - losses[-1] > 0.1, losses
    assert losses == pytest.approx(expected, abs=NEAR, rel=0)


PACKED = {  # layouts of packed conversations, and their ranks; a pipeline refuses them
    "fsdp": (("strategy=fsdp",), 2),
    "context": (("strategy=context", "strategy.context=2"), 2),
    "ddp": (("strategy=ddp",), 2),
    "tensor": (("strategy=tensor", "strategy.sequence_parallel=true"), 2),
    "fsdp × tensor": (("strategy=fsdp_tensor", "strategy.tensor=2"), 4),
}


@pytest.mark.parametrize("layout", PACKED)
def test_packed_conversations_have_these_losses_under_every_layout(runs, layout):
    name = "all weights, llama, packed"
    strategy, ranks = PACKED[layout]
    own = (*strategy, f"trainer.devices={ranks}", f"run.name=packed-{layout.replace(' ', '')}")
    if layout in ("ddp", "fsdp"):
        own = (*own, "data.micro_batch_size=1")  # so that both ranks accumulate
    straight, expected = runs[name]
    run = train(straight.parent, *JOBS[name], *own, ranks=ranks)
    assert running.losses(run) == pytest.approx(expected, abs=NEAR, rel=0)


def test_zero_3_that_resumes_has_these_losses_too(runs):
    """Weights from a folder, adapters and DeepSpeed, whose partitions are saved and read again
    halfway.
    """
    straight, expected = runs["adapters, llama"]
    root = straight.parent
    more = ("strategy=deepspeed_zero3", "trainer.devices=2", "run.name=zero3")
    for steps in (STEPS // 2, STEPS):
        train(root, *JOBS["adapters, llama"], *more, f"trainer.max_steps={steps}", ranks=2)
    assert running.losses(root / "zero3") == pytest.approx(expected, abs=NEAR, rel=0)
