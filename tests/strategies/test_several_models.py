"""LightningModules with several models, or with weights of their own: a GAN, a momentum teacher in
both idioms.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.parity.harness import STRATEGIES, import_object, on_ranks

KINDS = [
    "gan",
    "loose",
    "assigned before",
    "assigned between",
    "assigned after",
    "in place between",
]


def trained(strategy: str, options: dict[str, Any]) -> dict[str, list[float]]:
    return {kind: _trained(kind, strategy, options) for kind in KINDS}


def _trained(kind: str, strategy: str, options: dict[str, Any]) -> list[float]:
    """Return the losses of all steps, the norms of all final weights, and Lightning's norms of the
    last gradients.
    """
    import os
    import warnings

    import lightning as L
    import torch
    from lightning.pytorch.utilities import grad_norm
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

    from armature.training.trainer import Trainer

    warnings.filterwarnings("ignore")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def mlp(outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, outputs))

    def bce(logits: Tensor, target: int) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(
            logits, torch.full_like(logits, target)
        )

    class Recorded(L.LightningModule):
        losses: list[Tensor]
        norms: dict[str, float]

        def train_dataloader(self) -> DataLoader:
            x, size = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), 16 // ranks
            batches = [
                range(start + rank * size, start + (rank + 1) * size) for start in range(0, 64, 16)
            ]
            return DataLoader(x, batch_sampler=batches)  # pyright: ignore[reportArgumentType]

    class Gan(Recorded):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.discriminator, self.losses = mlp(8), mlp(1), []

        def training_step(self, x: Tensor, batch_idx: int) -> None:
            opt_g, opt_d = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
            self.toggle_optimizer(opt_g)
            loss_g = bce(self.discriminator(self.generator(x.flip(1))), 1)
            self.manual_backward(loss_g)
            opt_g.step()
            opt_g.zero_grad()
            self.untoggle_optimizer(opt_g)
            self.toggle_optimizer(opt_d)
            fake = self.generator(x.flip(1)).detach()
            loss_d = bce(self.discriminator(x), 1) + bce(self.discriminator(fake), 0)
            self.manual_backward(loss_d)
            self.norms = grad_norm(self, 2)
            opt_d.step()
            opt_d.zero_grad()
            self.untoggle_optimizer(opt_d)
            self.losses.append(loss_g.detach() + loss_d.detach())

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [
                torch.optim.Adam(part.parameters(), 1e-2)
                for part in (self.generator, self.discriminator)
            ]

    class Teacher(Recorded):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher, self.losses = mlp(8), mlp(8), []
            self.teacher.requires_grad_(False)

        def move_teacher(self) -> None:
            for student, teacher in zip(
                self.student.parameters(), self.teacher.parameters(), strict=True
            ):
                if kind.startswith("assigned"):
                    teacher.data = teacher.data * 0.7 + student.data * 0.3
                else:
                    teacher.data.mul_(0.7).add_(student.data, alpha=0.3)

        def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
            if kind.endswith("before"):
                self.move_teacher()
            student = self.student(x)
            with torch.no_grad():
                if kind.endswith("between"):
                    self.move_teacher()
                teacher = self.teacher(x.flip(1))
            loss = (student - teacher).square().mean() + (student - 1).square().mean()
            self.losses.append(loss.detach())
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            if kind.endswith("after"):
                self.move_teacher()

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.norms = grad_norm(self, 2)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.student.parameters(), 1e-2)

    class Loose(Recorded):
        """Parameters of its own, a list of parameters, and models in a container."""

        def __init__(self) -> None:
            super().__init__()
            self.nets, self.losses = nn.ModuleDict({"a": mlp(8), "b": mlp(1)}), []
            self.scale = nn.Parameter(torch.ones(8))
            self.shifts = nn.ParameterList([torch.zeros(1), torch.zeros(8)])

        def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
            y = self.nets["b"](self.nets["a"](x * self.scale) + self.shifts[1]) + self.shifts[0]
            loss = (y - x.sum(1, keepdim=True)).square().mean()
            self.losses.append(loss.detach())
            return loss

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.norms = grad_norm(self, 2)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 1e-2)

    L.seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        max_epochs=3,
        logger=False,
        use_distributed_sampler=False,
        strategy=import_object(STRATEGIES[strategy])(**options),
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=2 if kind == "loose" else 1,
    )
    module = {"gan": Gan, "loose": Loose}.get(kind, Teacher)()
    trainer.fit(module)
    weights = [getattr(p, "full_tensor", lambda p=p: p)().norm() for p in module.parameters()]
    losses = [trainer.strategy.reduce(loss) for loss in module.losses]
    return [float(value) for value in [*losses, *weights, *module.norms.values()]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("DDP", {}),
        ("MeshStrategy", {"shard": 2}),
        ("MeshStrategy", {"shard": 2, "min_num_params": 100}),  # some weights are sharded
    ],
)
def test_they_train_as_one_process_does(strategy: str, options: dict[str, Any]) -> None:
    (alone,) = on_ranks(trained, "SingleDevice", {}, ranks=1)
    both = on_ranks(trained, strategy, options, ranks=2)
    for kind in KINDS:
        assert both[0][kind] == pytest.approx(alone[kind], rel=1e-5), kind
