"""What modules and callbacks put into checkpoints, and what they change when one is loaded."""

import collections
import dataclasses
import enum
import functools
import io
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import DataLoader

from armature.checkpoint import convert, lightning_file, plain, state, storage
from armature.checkpoint.state import load_full_state_dict
from armature.errors import ConfigError
from armature.strategies.single import SingleDevice
from tests.lightning_habits.optimizers import SlowWeights

# what Lightning says of loaders and callbacks that differ, as they do here on purpose
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{warning}")
    for warning in (
        ".*dataloader is not resumable",
        "Be aware that when using `ckpt_path`",
        "The dirpath has changed",
        "Checkpoint directory .* exists and is not empty",
    )
]


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass(frozen=True)
class Fixed:
    number: int


@dataclasses.dataclass
class Rates:
    first: float
    others: Any


class Module(L.LightningModule):
    def __init__(
        self,
        width: int = 4,
        net: Any = None,
        layers: Any = None,
        color: Any = None,
        path: Any = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(3, width)
        self.head = nn.Linear(width, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(batch)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def trainer_for(folder: Path, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        callbacks=[*callbacks],
        default_root_dir=folder,
        **{"strategy": SingleDevice(), "max_steps": 2, **options},
    )


def fit(
    folder: Path,
    module: L.LightningModule,
    *callbacks: L.Callback,
    ckpt: Path | None = None,
    **options: Any,
):
    torch.manual_seed(0)
    trainer = trainer_for(folder, *callbacks, **options)
    data = torch.randn(6, 3, generator=torch.Generator().manual_seed(3))
    trainer.fit(module, DataLoader(data, batch_size=2), ckpt_path=ckpt)
    return trainer


def saved_by(folder: Path, module: L.LightningModule, *callbacks: L.Callback) -> Path:
    trainer = fit(folder, module, *callbacks)
    trainer.save_checkpoint(folder / "step=000002")
    return folder / "step=000002"


# ---------------------------------------------------------------- what is put in
def test_hyperparameters_of_every_kind_are_saved_or_left_out_by_name(tmp_path, caplog):
    plain._warn_once.cache_clear()
    module = Module(
        4,
        functools.partial(nn.Linear, 3),
        OmegaConf.create([1, {"a": 2}]),
        Color.RED,
        Path("a") / "b",
    )
    found = storage.read_meta(saved_by(tmp_path, module))["hyper_parameters"]
    assert found == {"width": 4, "layers": [1, {"a": 2}], "color": "red", "path": "a/b"}
    assert (
        "'net' is a functools.partial, which no checkpoint can hold. It is left out" in caplog.text
    )
    assert caplog.text.count("left out") == 1


class Keeps(L.Callback):
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return self.value


class Puts(Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value, self.got = value, None

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = self.value

    def on_load_checkpoint(self, checkpoint):
        self.got = checkpoint["mine"]


AS_THEY_ARE = (
    collections.Counter("aab"), {(1, 2): {3}}, torch.bfloat16, torch.device("cpu"), 2**100, None,
    1 + 2j,
)  # fmt: skip


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(0.5), 0.5),
        (np.int64(3), 3),
        (np.str_("a"), "a"),
        (np.array(["a", "b"]), ["a", "b"]),
        (Path("x/y"), "x/y"),
        (Color.RED, "red"),
        (Rates(0.1, (1, 2)), {"first": 0.1, "others": (1, 2)}),
        (collections.defaultdict(lambda: [0], a=[1]), {"a": [1]}),
        (frozenset([1]), {1}),
        (OmegaConf.create({"a": [1], "b": "${a}"}), {"a": [1], "b": [1]}),
        *((value, value) for value in AS_THEY_ARE),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_comes_back_plain(value, expected):
    stream = io.BytesIO()
    torch.save(plain.plain(value), stream)
    found = torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    "value",
    [
        nn.Linear, len, object(), slice(1), np.array([np.longdouble(1)]),
        # as plain keys they would be sets, dicts
        {frozenset({0, 1}): 3}, {frozenset({0, 1})}, {Fixed(1): 2},
    ],
)  # fmt: skip
def test_what_cannot_be_plain_is_refused_by_name_when_it_is_saved(tmp_path, value):
    with pytest.raises(
        ConfigError,
        match=r"checkpoint\['callbacks'\].*\['deep'\]\[1\].* is a .*, which no checkpoint can hold",
    ):
        saved_by(tmp_path, Module(), Keeps({"deep": [0, value]}))
    assert [path.name for path in tmp_path.iterdir()] == []


def test_what_a_modules_hook_gives_and_cannot_be_plain_comes_from_the_hook_again(tmp_path, caplog):
    plain._warn_once.cache_clear()
    saved = saved_by(tmp_path, Puts({"make": nn.Linear}))
    assert "checkpoint['mine']['make'] is a type, which no checkpoint can hold" in caplog.text
    again = Puts({"make": nn.Conv2d})
    fit(tmp_path, again, ckpt=saved, max_steps=3)
    assert again.got == {"make": nn.Conv2d}


# ---------------------------------------------------------------- what is changed on loading
class Renamed(Module):
    """Its first layer had another name, and its head was another size."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.layer = self.layer, nn.Identity()

    def training_step(self, batch):
        return self.head(self.body(batch)).square().mean()

    def on_load_checkpoint(self, checkpoint):
        weights = checkpoint["state_dict"]
        for name in [*weights]:
            if name.startswith("layer."):
                weights[name.replace("layer.", "body.")] = weights.pop(name)
        weights["head.bias"] = weights["head.bias"] + 1
        checkpoint["optimizer_states"] = []


class Stops(L.Callback):
    """Keeps the weights as they were loaded."""

    def on_fit_start(self, trainer, pl_module):
        self.loaded = {name: value.clone() for name, value in pl_module.state_dict().items()}


def test_a_module_renames_and_changes_what_it_loads(tmp_path):
    before, stops = saved_by(tmp_path, Module()), Stops()
    fit(tmp_path, Renamed(), stops, ckpt=before, max_steps=3)
    saved = load_full_state_dict(before)
    assert torch.equal(stops.loaded["body.weight"], saved["layer.weight"])
    assert torch.equal(stops.loaded["head.bias"], saved["head.bias"] + 1)


class Drops(Module):
    def on_load_checkpoint(self, checkpoint):
        del checkpoint["state_dict"]["head.weight"]


class LoadsTheRest(Drops):
    def load_state_dict(self, state_dict, strict):
        super().load_state_dict(state_dict, strict=False)


def test_what_a_module_drops_is_named_unless_it_loads_loosely(tmp_path):
    before = saved_by(tmp_path, Module())
    with pytest.raises(
        ConfigError, match=r"Not in the checkpoint: head\.weight\. Not in the model: nothing"
    ):
        fit(tmp_path, Drops(), ckpt=before, max_steps=3)
    module = LoadsTheRest()
    fresh, stops = module.head.weight.detach().clone(), Stops()
    fit(tmp_path, module, stops, ckpt=before, max_steps=3)
    assert torch.equal(stops.loaded["head.weight"], fresh)
    assert torch.equal(stops.loaded["layer.weight"], load_full_state_dict(before)["layer.weight"])


class Tracks(Module):
    """Keeps an array and an enum beside tensors, as torch's modules may; saved as plain values."""

    note = None

    def set_extra_state(self, state):
        self.note = state["note"]

    def get_extra_state(self):
        return {"note": np.arange(3.0), "color": Color.RED}


@pytest.mark.parametrize("name", ["step=000002", "two.ckpt"])
@pytest.mark.parametrize("way", ["resume", "evaluate", "initial_weights"])
def test_extra_state_is_the_same_in_a_file_and_a_directory(tmp_path, name, way):
    fit(tmp_path, Tracks()).save_checkpoint(path := tmp_path / name)
    module = Tracks()
    if way == "resume":
        fit(tmp_path, module, ckpt=path, max_steps=3)
    elif way == "evaluate":
        saved = state.read_whole(path) if path.is_dir() else lightning_file.read(path)
        state.load_tensors_of(path, module, saved["state_dict"])
    else:
        strategy = SingleDevice()
        strategy.connect(module)
        strategy.load_initial_weights(path)
    assert isinstance(module.note, np.ndarray)
    assert module.note.tolist() == [0, 1, 2]


class Reads(Module):
    def on_load_checkpoint(self, checkpoint):
        self.rate = checkpoint["optimizer_states"][0]["param_groups"][0]["lr"]
        checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = 0.0


def test_a_hook_reads_and_changes_the_optimizers_groups(tmp_path):
    before, module, stops = saved_by(tmp_path, Module()), Reads(), Stops()
    trainer = fit(tmp_path, module, stops, ckpt=before, max_steps=3)
    assert module.rate == 0.1
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.0
    assert torch.equal(stops.loaded["head.weight"], module.head.weight)
    assert all(float(state["step"]) == 3 for state in trainer.optimizers[0].state.values())


def train_on_ones(
    module: L.LightningModule, *callbacks: L.Callback, ckpt: Path | None = None
) -> dict[str, Any]:
    """Four steps that are the same whatever has been seen before."""
    trainer_for(Path(), *callbacks, max_steps=4).fit(
        module, DataLoader(torch.ones(8, 3), batch_size=2), ckpt_path=ckpt
    )
    return module.state_dict()


# ---------------------------------------------------------------- methods of torch's that a module
# replaces


class SavesTooLittle(Module):
    """A state dict of the trained weights, by a method without arguments."""

    def state_dict(self):
        return {n: value for n, value in super().state_dict().items() if n != "head.bias"}


def test_a_state_dict_that_leaves_out_what_is_trained_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"Adam trains head\.bias, which the module's state_dict leaves out"
    ):
        fit(tmp_path, SavesTooLittle())


# ---------------------------------------------------------------- files of Lightning's
def test_a_users_model_checkpoint_writes_lightnings_files(tmp_path):
    callback = ModelCheckpoint(
        dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1, save_last=True
    )
    straight = train_on_ones(Module(6), callback)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "epoch=0-step=1.ckpt",
        "epoch=0-step=2.ckpt",
        "epoch=0-step=3.ckpt",
        "epoch=0-step=4.ckpt",
        "last.ckpt",
    ]
    found = torch.load(tmp_path / "epoch=0-step=2.ckpt", weights_only=True)
    expected = {
        "state_dict",
        "hyper_parameters",
        "pytorch-lightning_version",
        "callbacks",
        "optimizer_states",
        "loops",
    }
    assert expected <= found.keys()
    assert found["hyper_parameters"]["width"] == 6
    for checkpoint in ("epoch=0-step=2.ckpt", "last.ckpt"):
        module = Module.load_from_checkpoint(tmp_path / checkpoint)
        assert module.layer.weight.shape == (6, 3)
    torch.testing.assert_close(module.state_dict(), straight, rtol=0, atol=0)
    stock = trainer_for(tmp_path, strategy="auto", max_steps=4)
    again = Module(6)
    data = DataLoader(torch.ones(8, 3), batch_size=2)
    stock.fit(again, data, ckpt_path=tmp_path / "epoch=0-step=2.ckpt", weights_only=True)
    torch.testing.assert_close(again.state_dict(), straight, rtol=0, atol=0)
    ours = train_on_ones(Module(6), ckpt=tmp_path / "epoch=0-step=2.ckpt")
    torch.testing.assert_close(ours, straight, rtol=0, atol=0)


# ---------------------------------------------------------------- optimizers
class ByLBFGS(Module):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class LooksAhead(Module):
    """Its optimizer saves slow weights and a counter beside torch's entries."""

    def configure_optimizers(self):
        return SlowWeights(super().configure_optimizers(), k=3)


class SavesInBatch(L.Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(("module", "step"), [(ByLBFGS, 1), (LooksAhead, 1)])
def test_every_optimizer_resumes_exactly(tmp_path, module, step):
    torch.manual_seed(0)
    straight = module()
    initial = {name: value.clone() for name, value in straight.state_dict().items()}
    path = tmp_path / "step=000002"
    weights = train_on_ones(straight, SavesInBatch(step, path))
    resumed = module()
    resumed.load_state_dict(initial)
    torch.testing.assert_close(train_on_ones(resumed, ckpt=path), weights, rtol=0, atol=0)
    convert.to_ckpt(path, tmp_path / "a.ckpt")
    file = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert file["optimizer_states"][0]["state"]
    assert not [key for key in file["optimizer_states"][0] if key.startswith(state.RESERVED)]
