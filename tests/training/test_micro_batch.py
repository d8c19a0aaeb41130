"""data.micro_batch_size=auto: memory that runs out in a step leads to a smaller micro-batch and the
same result.
"""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import armature
from armature import run_dir
from armature.checkpoint import resume
from armature.data.batching import plan_batches
from armature.layout import Layout
from armature.parallel import process_group
from armature.training.errors import memory_line
from armature.training.micro_batch import agree
from armature.validation import micro_batch
from tests import running

ALLOWED = "launch.allowed_packages=[armature,torch.optim,lightning.pytorch,tests]"
MANUAL = [
    "task._target_=tests.lightning_habits.regression.Manual",
    "~task.preview_prompt",
    "~task.preview_tokens",
]


def greedy(**arguments: object) -> list[str]:
    words = [f"+callbacks.greedy.{name}={value}" for name, value in arguments.items()]
    return ["+callbacks.greedy._target_=tests.memory_parts.Greedy", *words, ALLOWED]


# ---------------------------------------------------------------- sizes
@pytest.mark.parametrize(("sizes", "expected"), [([None, 4, 2], 2), ([None, None], None)])
def test_machines_with_a_run_directory_each_take_the_smallest_size(sizes, expected, monkeypatch):
    cfg = OmegaConf.create({"run": {}})
    agree(cfg)
    monkeypatch.setattr(process_group, "all_gather_object", lambda own: sizes)
    agree(cfg)
    assert OmegaConf.select(cfg, "run.micro_batch_size") == expected


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["data.global_batch_size=12"], [6, 4, 3, 2, 1]),
        (["data.global_batch_size=12", "strategy=ddp", "trainer.devices=2"], [3, 2, 1]),
        (
            [
                "data.global_batch_size=32",
                "strategy=pipeline",
                "trainer.devices=2",
                "model.tied=false",
            ],
            [16, 8, 4],
        ),
        (
            [
                "strategy=deepspeed",
                "trainer.devices=2",
                "trainer.precision=bf16-mixed",
                "optimizer=adamw",
            ],
            [2, 1],
        ),
        ([*MANUAL, "~task.preview_temperature", ALLOWED], []),
    ],
)
def test_the_next_sizes_divide_the_share_and_fit_the_layout(typed, expected, composed):
    cfg = composed(*typed)
    size, ranks = cfg.data.global_batch_size, Layout.of(cfg).data_ranks
    batches, found = plan_batches(size, "auto", ranks), []
    while (smaller := micro_batch.smaller(cfg, batches)) is not None:
        found.append(smaller)
        batches = plan_batches(size, smaller, ranks)
    assert found == expected


def test_a_size_is_kept_for_later_starts_under_the_same_circumstances(composed, tmp_path):
    cfg = run_dir.decide(composed("run.name=a", f"run.root={tmp_path}"), label="x")
    assert micro_batch.recorded(cfg) is None
    folder = run_dir.write(cfg, [])
    assert micro_batch.decided(cfg) is cfg
    run_dir.record_micro_batch_size(folder, 2)
    text = (folder / "config.yaml").read_text()
    assert (
        run_dir.read(folder).data.micro_batch_size,
        run_dir.read(folder).run.micro_batch_size,
    ) == ("auto", 2)
    assert "${" in text  # references stay
    assert micro_batch.recorded(cfg) == 2
    cfg.run.micro_batch_size = 2
    assert micro_batch.decided(cfg).data.micro_batch_size == 2
    assert run_dir.fingerprint(cfg) == run_dir.fingerprint(micro_batch.with_size(cfg, "auto"))
    wider = cfg.copy()
    wider.model.width = 64
    assert micro_batch.recorded(wider) is None
    typed = micro_batch.with_size(cfg, 4)
    assert (micro_batch.recorded(typed), micro_batch.decided(typed).data.micro_batch_size) == (
        None,
        4,
    )
    other = cfg.copy()  # a run that begins with the first one's weights
    other.run.dir, other.resume = str(tmp_path / "b"), str(folder)
    assert micro_batch.recorded(other) == 2


def test_the_message_names_auto_where_a_size_was_typed(composed):
    kinds = dict.fromkeys(
        ("parameters", "gradients", "optimizer state", "activations and other"), 2.0**30
    )
    auto = "data.micro_batch_size=auto finds the largest micro-batch that fits."
    assert auto in memory_line(composed("data.micro_batch_size=4"), kinds, where="rank 0")
    assert auto not in memory_line(composed(), kinds, where="rank 0")
    assert auto not in memory_line(composed("data.micro_batch_size=1"), kinds, where="rank 0")
    evaluation = memory_line(
        composed("data.eval_batch_size=6"), kinds, where="rank 0", evaluates=True
    )
    assert evaluation.endswith("Type data.eval_batch_size=3.")
    assert "micro_batch" not in evaluation


# ---------------------------------------------------------------- runs
@pytest.fixture(scope="module")
def train(corpus, tmp_path_factory):
    folder, cache = tmp_path_factory.mktemp("micro_batch"), tmp_path_factory.mktemp("cache")
    extra = {"PYTHONPATH": str(running.ROOT), "ARMATURE_CACHE": str(cache)}

    def run(name: str, *overrides: str, code: int = 0) -> tuple[Path, str]:
        words = [
            f"run.name={name}",
            "trainer.max_steps=4",
            "model.dropout=0.1",
            "checkpoint.every_n_steps=2",
            "launch.max_restarts=1",
        ]
        ended = running.train(*words, *overrides, cwd=folder, corpus=corpus, code=code, **extra)
        return folder / "outputs" / name, ended.stdout + ended.stderr

    return run


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return armature.load(folder, packages=["tests"]).state_dict()


@pytest.mark.slow
def test_a_restart_is_as_if_the_smaller_size_had_been_typed(train):
    small, output = train("small", *greedy(fits=2))
    assert "in step 1 (peak " in output
    assert (
        "micro-batch 8 → 4, with the same global batch of 8. Type data.micro_batch_size=4 to start"
        in output
    )
    assert (
        "micro-batch 4 → 2, with the same global batch of 8. Type data.micro_batch_size=2 to start"
        in output
    )
    assert "Traceback" not in output
    typed, _ = train("typed", "data.micro_batch_size=2")
    assert (small / "metrics.csv").read_text() == (typed / "metrics.csv").read_text()
    expected = weights(typed)
    assert all(torch.equal(value, expected[name]) for name, value in weights(small).items())
    cfg = OmegaConf.load(small / "config.yaml")
    assert (cfg.data.micro_batch_size, cfg.run.micro_batch_size) == ("auto", 2)
    _, output = train("small", *greedy(fits=2), "trainer.max_steps=5")
    assert "2 samples, as this run's earlier starts found" in output
    assert "2 micro × 4 accumulation" in output
    assert "→" not in output


@pytest.mark.slow
def test_memory_that_runs_out_late_costs_the_steps_since_the_last_checkpoint(train):
    words = [
        "model.dropout=0",
        "trainer.val_every_n_steps=4",
    ]  # a validation would save
    folder, output = train("late", *greedy(fits=4, step=3), *words)
    assert "in step 4 (peak " in output
    assert "step=000002, step 2" in output
    assert running.losses(folder) == pytest.approx(
        running.losses(train("whole", "model.dropout=0")[0]), rel=1e-5
    )


@pytest.mark.slow
def test_where_no_size_fits_the_ordinary_message_ends_the_run(train):
    _, output = train("never", *greedy(fits=0), code=1)
    assert output.count("→") == 3  # 8, 4, 2, 1
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB" in output
    assert "Memory ran out on rank 0. At the peak this rank held" in output
    _, output = train("evaluation", *greedy(fits=0, training=False), code=1)
    assert "→" not in output
    assert "Memory ran out on rank 0, in an evaluation." in output
    assert "Type data.eval_batch_size=" in output


@pytest.mark.slow
def test_several_ranks_restart(train):
    overrides = [
        "strategy=fsdp",
        "trainer.devices=2",
        "model.dropout=0",
    ]
    folder, output = train("fsdp", *overrides, *greedy(fits=2, rank=1))
    assert "Memory ran out on rank 1 in step 1 (peak " in output
    assert (
        "micro-batch 4 → 2, with the same global batch of 8. Type data.micro_batch_size=2 to start"
        in output
    )
    assert "The run resumes from the start." in output
    assert "2 micro × 2 accumulation × 2 data ranks" in output
    assert resume.last_checkpoint(folder) is not None
    single, _ = train("single", "model.dropout=0")
    expected = weights(single)
    for name, value in weights(folder).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)
