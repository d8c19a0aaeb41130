"""Targets are counted once per step, also where a closure is called twice or an epoch is left
within a step.
"""

from typing import Any

import pytest

from tests.support.parity.harness import DECODER, STRATEGIES, import_object, on_ranks
from tests.trainers import quiet_trainer

pytestmark = pytest.mark.slow

TWO_RANKS: dict[str, dict[str, Any]] = {
    "DDP": {},
    "MeshStrategy": {"shard": 2, "min_num_params": 0},
}


def trained(kind: str, strategy: str, options: dict[str, Any]) -> list[float]:
    """Return the sums of all final weights after three global batches of plain gradient descent."""
    import os
    import warnings

    import torch
    from torch.utils.data import DataLoader

    from armature.models.decoder.model import Decoder
    from armature.tasks.base import Task

    warnings.filterwarnings("ignore")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    accumulate = 1 if kind == "two closures" else 2

    class Own(Task):
        def train_dataloader(self) -> Any:
            generator = torch.Generator().manual_seed(0)
            inputs = torch.randint(96, (64, 16), generator=generator)
            targets = inputs.roll(-1, dims=1)
            targets[::3, 5:] = -100
            size, whole = 16 // ranks // accumulate, 16 // accumulate
            rows = [
                range(start + rank * size, start + (rank + 1) * size)
                for start in range(0, 64, whole)
            ]
            if kind == "left":  # what the epoch's end leaves out
                rows = rows[:2]
            samples = [{"inputs": i, "targets": t} for i, t in zip(inputs, targets, strict=True)]
            return DataLoader(samples, batch_sampler=rows)  # pyright: ignore[reportArgumentType]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if kind == "abandoned" and batch_idx == 3 else None

        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
        ) -> None:
            if kind == "two closures":
                optimizer_closure()
            optimizer.step(closure=optimizer_closure)

    task = Own(lambda: Decoder(**DECODER), optimizer=lambda groups: torch.optim.SGD(groups, lr=0.5))
    trainer = quiet_trainer(
        devices=ranks,
        max_steps=3,
        accumulate_grad_batches=accumulate,
        strategy=import_object(STRATEGIES[strategy])(seed=3, **options),
    )
    trainer.fit(task)
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in task.parameters())
    return [float(param.detach().double().square().sum()) for param in whole]


@pytest.mark.parametrize("kind", ["two closures", "abandoned"])
@pytest.mark.parametrize("strategy", TWO_RANKS)
def test_two_ranks_train_as_one_process_does(kind, strategy):
    found = on_ranks(trained, kind, strategy, TWO_RANKS[strategy], ranks=2)
    assert found[0] == pytest.approx(
        on_ranks(trained, kind, "SingleDevice", {}, ranks=1)[0], rel=1e-5
    )


def test_micro_batches_that_were_abandoned_weigh_nothing():
    abandoned = on_ranks(trained, "abandoned", "SingleDevice", {}, ranks=1)[0]
    assert abandoned == pytest.approx(
        on_ranks(trained, "left", "SingleDevice", {}, ranks=1)[0], rel=1e-6
    )
