"""What hooks get that ask for data, or change them, while the loop trains."""

import copy
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from armature.data.adapter import PlainData
from armature.data.base import DataModule
from armature.errors import ConfigError
from armature.training.trainer import Trainer

SIZE, BATCH = 12, 4
pytestmark = [
    pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*workers.*"),
    pytest.mark.filterwarnings(
        "ignore:.*LeafSpec.*:FutureWarning"
    ),  # Lightning 2.6 with torch 2.13
]


class Numbers(Dataset):
    offset = 0

    def __len__(self):
        return SIZE

    def __getitem__(self, index: int):
        return index + self.offset


class Plain(L.LightningDataModule):
    def __init__(self, *, workers: int = 0, **options) -> None:
        super().__init__()
        self.workers, self.options, self.scale = workers, options, 1.0

    def setup(self, stage):
        self.train = Numbers()

    def train_dataloader(self):
        return DataLoader(
            self.train, batch_size=BATCH, shuffle=True, num_workers=self.workers, **self.options
        )

    def val_dataloader(self):
        return DataLoader(self.train, batch_size=BATCH, num_workers=self.workers, **self.options)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch * self.scale


class Ours(DataModule):
    def dataset(self, split):
        return Numbers()


class Looks(L.LightningModule):
    """Iterates in the middle of an epoch over the training data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[int] = []
        self.found: dict[str, Any] = {}

    def training_step(self, batch, batch_idx):
        self.seen += batch.tolist()
        return self.weight.sum()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            trainer: Any = self.trainer
            module, loop = trainer.datamodule.train_dataloader(), trainer.train_dataloader
            self.found = {
                "module": [b.tolist() for b in module],
                "loop": [b.tolist() for b in loop],
            }
            self.found |= {"lengths": (len(module), len(loop)), "batch_size": loop.batch_size}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module, data, *callbacks, epochs: int = 1):
    data.setup("fit")
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=1,
        use_distributed_sampler=False,
        limit_val_batches=0,
        callbacks=list(callbacks),
    )
    trainer.fit(module, datamodule=data)
    return trainer


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["ours", "plain", "plain persistent"])
def test_a_hook_that_iterates_over_the_training_data_gets_all_and_takes_nothing_from_the_loop(
    kind, workers
):
    options = {"persistent_workers": True} if kind == "plain persistent" and workers else {}
    data = (
        Ours(global_batch_size=BATCH, num_workers=workers)
        if kind == "ours"
        else PlainData(Plain(workers=workers, **options))
    )
    module = Looks()
    fit(module, data, epochs=2)
    assert sorted(module.seen) == sorted(2 * [*range(SIZE)])
    second_epoch = [module.seen[i : i + BATCH] for i in range(SIZE, 2 * SIZE, BATCH)]
    assert module.found == {
        "module": second_epoch,
        "loop": second_epoch,
        "lengths": (3, 3),
        "batch_size": BATCH,
    }


class Moves(L.Callback):
    """Changes the data module and its dataset in each epoch, as curricula do."""

    def on_train_epoch_start(self, trainer: Any, pl_module):
        trainer.datamodule.scale = 10.0
        trainer.datamodule.train.offset = 100 * (trainer.current_epoch + 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_hooks_set_on_a_plain_data_module_reaches_it_and_the_workers_of_the_epoch(workers):
    module, data = Looks(), PlainData(Plain(workers=workers))
    fit(module, data, Moves(), epochs=2)
    expected = [10 * (i + 100 * epoch) for epoch in (1, 2) for i in range(SIZE)]
    assert sorted(module.seen) == expected
    assert data.scale == data.module.scale == 10.0
    data.train_limit = 3  # the adapter's own
    assert not hasattr(data.module, "train_limit")


def begin_worker(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.offset = 1000  # pyright: ignore[reportAttributeAccessIssue]


def test_worker_init_fn_sees_the_users_dataset():
    module = Looks()
    fit(module, PlainData(Plain(workers=1, worker_init_fn=begin_worker)))
    assert sorted(module.seen) == [1000 + i for i in range(SIZE)]


def test_the_dataset_of_a_loader_is_as_the_users():
    data = PlainData(Plain())
    data.setup("fit")
    dataset = data.val_dataloader().dataset
    assert dataset[3] == 3
    assert dataset.offset == 0
    dataset.offset = 5
    assert data.module.train.offset == 5
    assert not hasattr(dataset, "nothing")


class LooksAtValidation(L.LightningModule):
    """Takes a first batch in the middle of validation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.found: list[list[int]] = []

    def validation_step(self, batch, batch_idx):
        self.seen += batch.tolist()
        if batch_idx == 1:
            trainer: Any = self.trainer
            self.found = [
                next(iter(each)).tolist()
                for each in (trainer.datamodule.val_dataloader(), trainer.val_dataloaders)
            ]


@pytest.mark.parametrize("persistent", [False, True], ids=["ours", "plain persistent"])
def test_a_hook_that_looks_at_validation_data_takes_nothing_from_the_loop(persistent):
    module = LooksAtValidation()
    data = (
        PlainData(Plain(workers=1, persistent_workers=True))
        if persistent
        else Ours(global_batch_size=BATCH, eval_batch_size=BATCH, num_workers=1)
    )
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    for _ in range(2):
        module.seen, module.found = [], []
        trainer.validate(module, datamodule=data, verbose=False)
        assert (module.seen, module.found) == ([*range(SIZE)], [[0, 1, 2, 3]] * 2)


def test_workers_stay_for_the_next_reader():
    data = Ours(global_batch_size=BATCH, eval_batch_size=BATCH, num_workers=1)
    loader: Any = data.val_dataloader()
    assert [len(batch) for batch in loader] == [BATCH] * 3
    workers = loader._iterator
    last = iter(loader)
    next(last)
    assert loader._iterator is workers
    first = next(iter(loader)).tolist()  # from another loader
    assert loader._iterator is workers
    assert (first, next(last).tolist()) == ([0, 1, 2, 3], [4, 5, 6, 7])
    del last
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert loader._iterator is workers


class Wraps(Ours):
    def train_dataloader(self):
        loader: Any = super().train_dataloader()
        return DataLoader(loader.dataset, batch_size=BATCH)


@pytest.mark.slow
def test_a_training_loader_that_ours_does_not_make_is_refused():
    with pytest.raises(
        ConfigError, match=r"Wraps.train_dataloader returns a DataLoader of its own"
    ):
        fit(Looks(), Wraps(global_batch_size=BATCH))


class OfOurNames(Plain):
    """Its attributes have names that our wrapper has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.seed, self.class_names, self.train_size, self.num_workers = (
            123,
            ["a", "b"],
            0.75,
            "many",
        )

    def setup(self, stage):
        super().setup(stage)
        self.dataset = self.train

    def collate_fn(self, samples):
        return "mine"

    def __len__(self):
        return 7


def test_the_users_data_module_is_what_hooks_see():
    seen: dict[str, Any] = {}

    class Reads(L.Callback):
        def on_train_start(self, trainer: Any, pl_module):
            seen["data"] = trainer.datamodule
            seen["found"] = [
                getattr(trainer.datamodule, n)
                for n in ("seed", "class_names", "train_size", "num_workers")
            ]
            trainer.datamodule.seed = 5
            trainer.datamodule.global_batch_size_of_mine = 6

    own = OfOurNames()
    wrapper = PlainData(own, seed=1)
    trainer: Any = fit(Looks(), wrapper, Reads(), epochs=2)

    data = seen["data"]
    assert data is trainer.datamodule
    assert trainer.run_data is wrapper
    assert seen["found"] == [123, ["a", "b"], 0.75, "many"]
    assert (own.seed, wrapper.seed, own.global_batch_size_of_mine) == (5, 1, 6)  # pyright: ignore
    assert (data.collate_fn([]), data.dataset) == ("mine", own.train)
    assert isinstance(data, OfOurNames)
    assert not isinstance(data, DataModule)
    assert data.global_batch_size == BATCH  # only the wrapper has it
    with pytest.raises(AttributeError, match="'OfOurNames' object has no attribute 'nothing'"):
        data.nothing  # noqa: B018
    assert copy.deepcopy(data).class_names == ["a", "b"]
    assert (len(data), len(copy.deepcopy(data))) == (7, 7)
    with pytest.raises(TypeError):
        iter(data)


def test_the_position_is_saved_under_one_name_whatever_the_users_class_is_called(tmp_path):
    trainer = fit(Looks(), PlainData(OfOurNames()))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    saved = torch.load(tmp_path / "x.ckpt", weights_only=False)
    assert saved["PlainData"]["samples_seen"] == SIZE
    assert "OfOurNames" not in saved
