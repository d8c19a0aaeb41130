"""When memory runs out, the message says what held it and what to type."""

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from armature.training.errors import RecordError, bytes_by_kind, is_out_of_memory
from armature.validation.memory import overrides
from tests.trainers import quiet_trainer

GIB = 2**30
KINDS = ("parameters", "gradients", "optimizer state", "activations and other")


@pytest.mark.parametrize(
    ("typed", "sizes", "expected"),
    [
        (
            [],
            (1, 1, 2, 10),
            [
                "strategy.activation_checkpointing=every",
                "data.micro_batch_size=4",
                "trainer.precision=bf16-mixed",
            ],
        ),
        (
            ["strategy=ddp", "trainer.devices=2", "data.micro_batch_size=2"],
            (5, 5, 10, 4),
            ["strategy=fsdp", "strategy.activation_checkpointing=every", "data.micro_batch_size=1"],
        ),
        (
            ["data.micro_batch_size=1", "trainer.precision=bf16-mixed"],
            (5, 5, 10, 4),
            ["strategy.activation_checkpointing=every"],
        ),
        (
            [
                "strategy=fsdp",
                "trainer.devices=2",
                "data.micro_batch_size=1",
                "strategy.activation_checkpointing=every",
            ],
            (5, 5, 10, 4),
            ["trainer.precision=bf16-mixed"],
        ),
        # a pipeline divides a micro-batch into its own
        (
            [
                "strategy=pipeline",
                "trainer.devices=2",
                "model.tied=false",
                "strategy.microbatches=8",
            ],
            (1, 1, 2, 10),
            ["strategy.activation_checkpointing=every", "trainer.precision=bf16-mixed"],
        ),
    ],
)
def test_only_overrides_that_fit_are_named_the_best_first(typed, sizes, expected, composed):
    assert overrides(composed(*typed), kinds=dict(zip(KINDS, sizes, strict=True))) == expected


def test_every_override_is_accepted_when_it_is_typed(composed):
    for strategy in ("single", "ddp", "fsdp"):
        typed = [f"strategy={strategy}", f"trainer.devices={1 if strategy == 'single' else 2}"]
        for override in overrides(composed(*typed)):
            composed(*typed, override)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_missing_memory_is_recognized_on_any_device(error, expected):
    assert is_out_of_memory(error) is expected


class Greedy(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            torch.empty(2**60, dtype=torch.uint8)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def test_the_error_explains_itself(composed, tmp_path):
    cfg = composed()
    trainer = quiet_trainer(callbacks=[RecordError(cfg)], max_epochs=1, default_root_dir=tmp_path)
    module = Greedy()
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(module)
    (note,) = caught.value.__notes__
    assert note.startswith("Memory ran out on rank 0. At the peak this rank held ")
    assert (
        "What would help most: strategy.activation_checkpointing=every, or data.micro_batch_size=4"
        in note
    )
    kinds = bytes_by_kind(module, trainer.optimizers, peak=GIB)
    weights = sum(p.numel() for p in module.parameters()) * 4
    assert kinds["parameters"] == weights
    assert kinds["optimizer state"] == 2 * weights + 4 * 2  # two moments, and a step per tensor
    assert sum(kinds.values()) == GIB


def test_a_plain_data_modules_batch_is_unknown_before_launch(composed):
    cfg = composed()
    cfg.data.global_batch_size, cfg.data.micro_batch_size = (
        None,
        "auto",
    )  # as for a LightningDataModule of others
    assert "data.micro_batch_size" not in " ".join(overrides(cfg))


def test_memory_advice_never_accumulates_where_a_module_optimizes_manually(composed):
    removed = ["~task.preview_prompt", "~task.preview_tokens", "~task.preview_temperature"]
    allowed = "launch.allowed_packages=[armature,torch.optim,lightning.pytorch,tests]"
    manual = composed("task._target_=tests.lightning_habits.regression.Manual", *removed, allowed)
    assert "data.micro_batch_size" in " ".join(overrides(composed()))
    assert "data.micro_batch_size" not in " ".join(overrides(manual))
