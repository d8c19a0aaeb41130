"""Attributes of users' objects that training has changed are saved, and put back at a resume."""

import enum
import random
from collections import ChainMap, deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric

from armature.checkpoint import plain
from armature.training import user_state
from tests.data.test_data_module import NumbersData


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Loss:
    def __init__(self) -> None:
        self.center, self.owner = torch.zeros(2), [self]


@dataclass
class Meter:
    count: int = 0


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(1)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), Noise(), nn.Dropout())
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.norms, self.seen, self.best = [1.0], {"b", "a"}, {"x": (1, None)}
        self.queue, self.generator = deque([1], maxlen=3), torch.Generator()
        self.replay = [user_state._Kept(1, False)]
        self.python, self.array, self.score = random.Random(0), np.zeros(3), None
        self.points, self.meter = TensorDataset(torch.zeros(2)), Meter()
        # as a closed file, whose items cannot be read
        self.closed = ChainMap(None)  # pyright: ignore[reportArgumentType]
        self.criterion, self.color = Loss(), Color.RED
        self.large, self.folder = [torch.zeros(2_000_000), *[Meter()] * 1_000], Path("a")


class Counts(L.Callback):
    bad = 0  # becomes an attribute of the object when it is counted

    def __init__(self):
        self.mean = MeanMetric()


class Slow(torch.optim.SGD):
    steps = 0

    def __init__(self, params):
        super().__init__(params)
        self.inner = torch.optim.SGD(self.param_groups)


def trainer_of(module: Any, *callbacks: Any) -> Any:
    return SimpleNamespace(
        lightning_module=module,
        callbacks=callbacks,
        optimizers=[Slow(module.parameters())],
        datamodule=NumbersData(),
        lr_scheduler_configs=[],
        gradient_clip_val=1.0,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )


def watched(trainer):
    return user_state.UserState(trainer, user_state.marks(trainer))


def change(trainer: Any) -> None:
    module, callback, optimizer = trainer.lightning_module, *trainer.callbacks, *trainer.optimizers
    module.norms.append(2.0)
    module.seen.add("c")
    module.best["y"] = (2, [3])
    module.queue.extend([2, 3, 4])
    module.replay[0] = user_state._Kept(2, True)
    torch.rand(1, generator=module.generator)
    module.python.random()
    module.array += 1
    module.net[1].rng.random()
    module.net[2].p = 0.3
    module.net[2].eval()
    module.net[0].weight.requires_grad = False
    module.table += 2
    module.criterion.center += 1
    module.meter.count += 4
    module.color, module.folder, module.score = Color.BLUE, Path("b"), np.float64(0.5)
    module.new = module.points.tensors = {"made": 1}
    callback.bad += 1
    callback.mean.update(3.0)
    optimizer.steps += 2
    optimizer.param_groups[0]["lr"] = 0.2
    trainer.datamodule.difficulty = 3
    trainer.gradient_clip_val = 0.5


def values(trainer: Any) -> list[Any]:
    module, callback, optimizer = trainer.lightning_module, *trainer.callbacks, *trainer.optimizers
    return [
        module.norms, module.seen, module.best, module.queue, module.color, module.folder,
        module.net[2].training, module.net[0].weight.requires_grad,
        module.array.tolist(), module.net[2].p, module.table.tolist(), module.score, module.replay,
        module.criterion.center.tolist(), module.meter, module.points.tensors, module.new,
        callback.bad, callback.mean.compute(),
        optimizer.steps, trainer.datamodule.difficulty, trainer.gradient_clip_val,
        module.python.random(), module.net[1].rng.random(),
        torch.rand(1, generator=module.generator),
    ]  # fmt: skip


def test_what_changed_is_put_back_as_the_type_that_it_had():
    saving, resumed = (trainer_of(Module(), Counts()) for _ in range(2))
    state = watched(saving)
    assert not state.changed()
    change(saving)
    saved = plain.plain(state.changed())
    assert not {"module.large", "module.net.0.in_features"} & saved.keys()
    module, (slow,) = resumed.lightning_module, resumed.optimizers
    shared = module.norms
    user_state.put_back(resumed, saved)
    assert values(resumed) == values(saving)
    assert module.norms is shared
    assert slow.param_groups[0] is slow.inner.param_groups[0]
    assert module.criterion.owner == [module.criterion]


def test_lists_of_weights_stay_those_of_the_model_and_shared_samples_are_shared():
    trainer = trainer_of(Module())
    module = trainer.lightning_module
    module.weights, module.shadows = [*module.parameters()], [nn.Parameter(torch.zeros(2))]
    state, held = watched(trainer), [*module.shadows, *module.points.tensors]
    for each in (module.weights[0], *held):
        each.data.add_(1)
    saved = plain.plain(state.changed())
    assert saved.keys() == {"module.shadows", "module.points.tensors"}
    for each in held:
        each.data.zero_()
    user_state.put_back(trainer, saved, {"module.shadows": (list, b"another setting")})
    assert not held[0].any()
    user_state.put_back(trainer, saved)
    assert module.shadows[0] is held[0]
    assert held[0].tolist() == held[1].tolist() == [1, 1]


def too_large(module):
    module.large[0].data += 1


@pytest.mark.parametrize(
    ("keep", "name"),
    [
        (too_large, "large"),
        (lambda m: vars(m).update(numbers=iter(())), "numbers"),
        (lambda m: m.norms.append(object()), "norms"),
    ],
)
def test_what_cannot_be_put_back_is_named_once(caplog, keep, name):
    trainer = trainer_of(Module())
    state = watched(trainer)
    keep(trainer.lightning_module)
    for _ in range(2):
        assert not state.changed()
    (message,) = caplog.messages
    assert f"A resume does not put back: module.{name}." in message


def test_a_long_list_of_samples_is_not_read_at_each_save(monkeypatch):
    read = []
    monkeypatch.setattr(user_state, "digest", read.append)
    user_state._mark([torch.zeros(500_000)] * 3)
    assert not read


def test_a_rank_keeps_what_differs_from_the_others(monkeypatch, caplog):
    first, second = {"module.seen": user_state._Kept(1, False)}, {}
    assert user_state.of_ranks([first, first]) == [first]
    saved = user_state.of_ranks([first, second])
    assert user_state.of_rank(saved) == first  # in one process now
    assert "module.seen" in caplog.text
    monkeypatch.setattr(user_state.process_group, "ranks", lambda: 2)
    monkeypatch.setattr(user_state.process_group, "rank", lambda: 1)
    assert user_state.of_rank(saved) == second
