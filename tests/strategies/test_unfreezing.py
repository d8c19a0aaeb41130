"""A module that freezes and unfreezes weights while it trains: as in one process, or it is refused
by name.
"""

from typing import Any

import pytest

from tests.support.parity.harness import STRATEGIES, import_object, on_ranks
from tests.trainers import quiet_trainer

pytestmark = pytest.mark.slow


def trained(
    strategy: str, options: dict[str, Any], accumulate: int = 1, where: str = "batch"
) -> dict[str, Any]:
    """Return the final weights of a model whose first layer is unfrozen before the third global
    batch.

    Args:
        where: `batch`, between batches; `step`, inside training_step; `turns`, frozen and unfrozen
            in turns; `micro`, the layer that was trained is frozen between the micro-batches of a
            global batch; `backbone`, as `batch`, of a model of its own.
    """
    import os
    import warnings

    import lightning as L
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader

    warnings.filterwarnings("ignore")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    class Unfreezes(L.LightningModule):
        mean_over_targets = False

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model: Any = nn.Sequential(
                nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
            )
            self.model[0].requires_grad_(where == "micro")
            self.backbone = self.model[:2] if where == "backbone" else nn.Identity()
            self.model = self.model[2:] if where == "backbone" else self.model

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if where == "batch" and batch_idx == 2 * accumulate:
                self.model[0].requires_grad_(True)
            elif where == "backbone" and batch_idx == 2:
                self.backbone.requires_grad_(True)
            elif where == "turns":
                self.model[0].requires_grad_(batch_idx // accumulate in (0, 1, 4))
                self.model[2].requires_grad_(batch_idx // accumulate % 2 == 0)
            elif where == "micro":
                self.model[0].requires_grad_(batch_idx % 3 == 0)

        def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
            if where == "step" and batch_idx == 2:
                self.model[0].requires_grad_(True)
            return (self.model(self.backbone(x)) - x.sum(dim=1, keepdim=True).sin()).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

        def train_dataloader(self) -> DataLoader:
            x, size = (
                torch.randn(96, 8, generator=torch.Generator().manual_seed(0)),
                16 // ranks // accumulate,
            )
            starts = [s + j * size * ranks for s in range(0, 96, 16) for j in range(accumulate)]
            batches = [range(start + rank * size, start + (rank + 1) * size) for start in starts]
            return DataLoader(x, batch_sampler=batches)  # pyright: ignore[reportArgumentType]

    module = Unfreezes()
    trainer = quiet_trainer(
        strategy=import_object(STRATEGIES[strategy])(**options),
        devices=ranks,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(module)
    whole = {
        n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in module.named_parameters()
    }  # pyright: ignore[reportAttributeAccessIssue]
    return {name: param.detach().flatten().tolist() for name, param in whole.items()}


@pytest.mark.parametrize(
    ("strategy", "options", "accumulate", "where"),
    [
        ("DDP", {}, 2, "batch"),
        ("DDP", {}, 1, "turns"),
        ("DDP", {}, 4, "micro"),
        ("MeshStrategy", {"shard": 2}, 1, "turns"),
        ("MeshStrategy", {"shard": 2, "reduce_every_microbatch": False}, 4, "micro"),
        ("MeshStrategy", {"shard": 2}, 2, "batch"),
    ],
)
def test_gradients_of_weights_that_are_frozen_and_unfrozen_are_reduced(
    strategy, options, accumulate, where
):
    (expected,) = on_ranks(trained, "SingleDevice", {}, accumulate, where, ranks=1)
    ranks = on_ranks(trained, strategy, options, accumulate, where, ranks=2)
    for name, values in expected.items():
        for found in ranks:
            assert found[name] == pytest.approx(values, abs=1e-5), name


def test_a_backbone_is_unfrozen_in_mixed_precision():
    """Its unit of FSDP has had nothing to train, and no type for its gradients."""
    options = {"shard": 2, "param_dtype": "bfloat16", "reduce_dtype": "float32"}
    (expected,) = on_ranks(trained, "SingleDevice", {}, 1, "backbone", ranks=1)
    for found in on_ranks(trained, "MeshStrategy", options, 1, "backbone", ranks=2):
        assert found["backbone.0.weight"] == pytest.approx(expected["backbone.0.weight"], abs=2e-2)


@pytest.mark.parametrize(
    ("strategy", "options", "where", "message"),
    [
        (
            "MeshStrategy",
            {"tensor": 2},
            "batch",
            r"model.0.weight, model.0.bias is frozen or unfrozen .* type strategy=ddp",
        ),
        (
            "DDP",
            {},
            "step",
            r"unfrozen inside training_step.* unfreeze it in on_train_batch_start",
        ),
    ],
)
def test_what_cannot_be_reduced_is_refused(strategy, options, where, message):
    with pytest.raises(RuntimeError, match=message):
        on_ranks(trained, strategy, options, 1, where, ranks=2)
