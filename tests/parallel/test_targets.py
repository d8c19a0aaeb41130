"""Weights of micro-batches with different numbers of targets; tests/parallel/test_parity.py
compares layouts.
"""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from armature.errors import ConfigError
from armature.parallel.targets import TargetWeights, weigh
from armature.tasks.base import Task
from tests.trainers import quiet_trainer

COUNTED = [4, 1, 0, 3]  # targets of the four micro-batches of a step


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for counted in COUNTED * 3:
        targets = torch.randint(0, 3, (4,), generator=generator)
        targets[counted:] = -100
        made.append({"inputs": torch.randn(4, 5, generator=generator), "targets": targets})
    return made


class Linear(nn.Linear):
    def forward(self, inputs, targets):
        total = nn.functional.cross_entropy(
            super().forward(inputs), targets, ignore_index=-100, reduction="sum"
        )
        return total / (targets != -100).sum().clamp(min=1)


class ClipsByItself(Task):
    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        nn.utils.clip_grad_norm_(self.parameters(), 0.3)


class Looks(Task):
    def on_before_optimizer_step(self, optimizer):
        self.seen.append(self.model.weight.grad.clone())


class Unweighed(Task):
    mean_over_targets = False


class Named(Task):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "more": 1}


def trained(
    task: type[Task],
    data: list[dict[str, torch.Tensor]],
    *,
    accumulate: int,
    callbacks: list[L.Callback] | None = None,
) -> torch.Tensor:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Linear(5, 3)

    made = task(model, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.5))
    trainer = quiet_trainer(
        accumulate_grad_batches=accumulate, max_epochs=1, callbacks=callbacks, limit_val_batches=0
    )
    loader = DataLoader(data, batch_size=None)
    trainer.fit(made, loader, loader)
    assert made.model is not None
    return made.model.weight.detach()


def together(data: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Return one batch per step instead of four micro-batches."""
    return [
        {key: torch.cat([b[key] for b in data[i : i + 4]]) for key in data[i]}
        for i in range(0, len(data), 4)
    ]


@pytest.mark.parametrize("task", [Task, ClipsByItself, Named])
def test_accumulation_is_the_mean_over_all_targets(task):
    torch.testing.assert_close(
        trained(task, batches(), accumulate=4), trained(task, together(batches()), accumulate=1)
    )


def test_a_hook_before_the_optimizer_step_sees_the_whole_steps_gradients(monkeypatch):
    monkeypatch.setattr(Looks, "seen", parts := [], raising=False)
    trained(Looks, batches(), accumulate=4)
    monkeypatch.setattr(Looks, "seen", whole := [])
    trained(Looks, together(batches()), accumulate=1)
    torch.testing.assert_close(parts, whole)


def test_a_task_can_declare_that_its_loss_is_not_a_mean_over_targets():
    alone, plain = (
        trained(Unweighed, batches(), accumulate=4),
        trained(Task, together(batches()), accumulate=1),
    )
    assert not torch.allclose(alone, plain, atol=1e-2)


def test_an_epoch_may_end_with_fewer_micro_batches():
    whole = [*together(batches())[:2], *together(batches())[2:3]]
    whole[2] = {key: value[:8] for key, value in whole[2].items()}  # two of four micro-batches
    torch.testing.assert_close(
        trained(Task, batches()[:10], accumulate=4), trained(Task, whole, accumulate=1)
    )


@pytest.mark.parametrize(
    "batch",
    [torch.zeros(3), {"inputs": torch.zeros(3)}, {"targets": torch.zeros(3)}],
    ids=["tensor", "none", "float"],
)
def test_batches_without_class_targets_are_not_weighted(batch):
    weights, loss = TargetWeights(), torch.tensor(2.0)
    weights.count_batch(batch)
    assert weights.weight_loss(loss, micro_batches=2, ranks=1) is loss
    assert weights.gradient_scale(micro_batches=2, ranks=1) is None


def test_a_module_counts_targets_by_a_method_of_its_own():
    weights, batch = TargetWeights(), {"labels": torch.tensor([[1, 2, -100]])}
    weights.count_batch(batch, lambda batch: (batch["labels"][:, 1:] != -100).sum())
    assert weights.weight_loss(torch.tensor(1024.0), micro_batches=1, ranks=1) == 1
    with pytest.raises(ConfigError, match="this batch has 'labels'"):
        weights.count_batch(batch)


def test_a_skipped_micro_batch_is_not_counted():
    weights = TargetWeights()
    for goes_backward, targets in ((True, 1024), (False, 512)):
        weights.count_batch({"targets": torch.zeros(targets, dtype=torch.long)})
        if goes_backward:
            weights.weight_loss(torch.tensor(2.0), micro_batches=2, ranks=1)
    assert weights.gradient_scale(micro_batches=2, ranks=1) == 2.0


def test_hooks_see_the_loss_that_the_task_returned(monkeypatch):
    given, seen = [], []

    class Watched(Task):
        def training_step(self, batch, batch_idx):
            given.append(super().training_step(batch, batch_idx))
            return given[-1]

        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append(outputs["loss"] * 4)

    trained(Watched, batches(), accumulate=4)
    torch.testing.assert_close(seen, [loss.detach() for loss in given])


def test_a_loss_of_no_targets_weighs_nothing_and_is_not_nan():
    logits = torch.randn(4, 5, requires_grad=True)
    loss = F.cross_entropy(logits, torch.full((4,), -100))  # as a user's model may compute it
    assert loss.isnan()
    weighed = weigh(loss, torch.tensor(0.0))
    weighed.backward()
    assert weighed.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros(4, 5))  # pyright: ignore[reportArgumentType]
    assert float(weigh(torch.tensor(3.0), torch.tensor(0.5))) == 1.5
    assert float(weigh(torch.tensor(3.0), None)) == 3.0
    weights = TargetWeights()
    weights.count_batch({"targets": torch.full((4,), -100)})
    assert float(weights.weight_loss(loss.detach(), micro_batches=2, ranks=1)) == 0.0
    weights.count_batch({"targets": torch.zeros(1, dtype=torch.long)})
    assert float(weights.weight_loss(torch.tensor(2048.0), micro_batches=2, ranks=1)) == 2.0
