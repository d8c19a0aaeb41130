"""Plain LightningDataModules, as people bring them: which samples a run sees, in which order, also
after a resume, and what hooks get that look at the data.
"""

import random
from itertools import chain, repeat
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from omegaconf import OmegaConf
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from armature.data import feed as feeds
from armature.data import iterable
from armature.data.base import DataModule
from armature.errors import ConfigError
from tests.data import feeding
from tests.data.feeding import Rank, feed, served
from tests.trainers import quiet_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*dataloader is not resumable.*"),
    pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*workers.*"),
    pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled"),
]


class Numbers(Dataset):
    """Sample i is (i, a random number).

    It has attributes that mean something else in our own datasets.
    """

    augment = True
    offset = 0

    def __init__(self, size: int = 20) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int):
        if index >= self.size:
            raise IndexError(index)
        drawn = random.random() + np.random.rand() + torch.rand(()).item()
        return index + self.offset, drawn

    def batch(self, batch_size: int):
        raise AssertionError("the dataset's own method, which has another meaning")


class Plain(L.LightningDataModule):
    """As in Lightning's documentation; `loader` makes the training loader."""

    def __init__(self, loader=None, *, size: int = 20, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["loader"])
        self.make = loader or (
            lambda data: DataLoader(data, batch_size=self.per_device, shuffle=True)
        )
        self.calls: list[str] = []
        self.held_out = torch.randperm(20).tolist()

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(f"setup {getattr(stage, 'value', stage)}")
        self.per_device = self.hparams["batch_size"]
        if self.trainer is not None:  # as lightning-hydra-template does
            assert self.per_device % self.trainer.world_size == 0
            self.per_device //= self.trainer.world_size
        if not hasattr(self, "train"):
            self.train, self.val = random_split(
                Numbers(self.hparams["size"] + 7), [self.hparams["size"], 7]
            )

    def train_dataloader(self):
        return self.make(self.train)

    def val_dataloader(self):
        own = DataLoader(self.val, batch_size=3)
        return CombinedLoader([own, DataLoader(Numbers(5), 2, shuffle=True)], "sequential")

    def test_dataloader(self):
        return DataLoader(Numbers(9), batch_size=self.per_device)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [*batch, "hooked"]

    def teardown(self, stage):
        self.calls.append(f"teardown {getattr(stage, 'value', stage)}")

    def state_dict(self):
        return {"seen": len(self.calls)}

    def load_state_dict(self, state_dict):
        self.calls.append(f"loaded {state_dict['seen'] > 0}")


class Recorder(feeding.Recorder):
    def training_step(self, batch, batch_idx):
        assert type(self.trainer.datamodule) is Plain  # pyright: ignore[reportAttributeAccessIssue]
        assert batch[2] == "hooked"
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.validated.append((dataloader_idx, batch[0].tolist()))

    def test_step(self, batch, batch_idx):
        self.validated += batch[0].tolist()


def fit(module, folder, **settings):
    return feeding.fit(module, Recorder(), folder, **settings)


def test_each_sample_is_trained_once_per_epoch_and_hooks_are_called_once(tmp_path):
    module = Plain()
    task, fed, trainer = fit(module, tmp_path, steps=10)
    assert fed.global_batch_size == 4
    assert fed.batch_note == " (batch_size=4 of Plain is the global batch)"
    first, second = (list(chain(*task.steps[k : k + 5])) for k in (0, 5))
    own = sorted(module.train.indices)
    assert sorted(first) == sorted(second) == own
    assert first != own
    assert first != second
    assert module.calls == ["prepare_data", "setup fit", "teardown fit"]
    validated, task.validated = task.validated, []
    trainer.test(task, datamodule=module, verbose=False)
    assert task.validated == list(range(9))
    assert module.calls[3:] == ["setup test", "teardown test"]
    loaders = {
        loader: [i for which, batch in validated if which == loader for i in batch]
        for loader in (0, 1)
    }
    assert loaders[0] == list(module.val.indices) * 2
    assert sorted(loaders[1][:5]) == list(range(5))


class Pairs(Sampler):
    """A batch sampler: neighbors share a batch."""

    def __init__(self, size: int, *, same: bool = True) -> None:
        self.size, self.same = size, same

    def __len__(self):
        return self.size // 4

    def __iter__(self):
        for first in torch.randperm(self.size // 4).tolist():
            yield list(range(4 * first, 4 * first + (4 if self.same or first else 3)))


class ByEpoch(Sampler):
    """Orders by epoch, as set_epoch says."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 20

    def __iter__(self):
        return iter(np.roll(np.arange(20), self.epoch))


class Shuffles(ByEpoch):
    """Shuffles in place what it keeps, as pytorch-metric-learning's MPerClassSampler does."""

    def __init__(self):
        self.order = np.arange(20)

    def set_epoch(self, epoch):
        np.random.shuffle(self.order)

    def __iter__(self):
        np.random.shuffle(self.order)
        return iter(self.order.tolist())


class Numbered(IterableDataset):
    """Divides its samples among workers, as torch's documentation says, and draws random
    numbers.
    """

    def __init__(self, size: int = 20) -> None:
        self.size = size

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, self.size, step):
            yield i, torch.rand(()).item() + random.random()


class Filtered(DataLoader):
    """As PyTorch Geometric's NeighborLoader, which changes batches in the main process."""

    def _get_iterator(self):
        return map(list, super()._get_iterator())


LOADERS = {
    "shuffled": None,
    "in order": lambda data: DataLoader(data, batch_size=4),
    "workers": lambda data: DataLoader(data, batch_size=4, shuffle=True, num_workers=2),
    "weighted": lambda data: DataLoader(
        data, batch_size=4, sampler=WeightedRandomSampler([1.0] * 10 + [9.0] * 10, 20)
    ),
    "replacement": lambda data: DataLoader(
        data, batch_size=4, sampler=RandomSampler(data, True, 14)
    ),
    "subset": lambda data: DataLoader(
        data, batch_size=4, sampler=SubsetRandomSampler([1, 3, 5, 7, 9, 11])
    ),
    "own epochs": lambda data: DataLoader(data, batch_size=4, sampler=ByEpoch()),
    "in place": lambda data: DataLoader(data, batch_size=4, sampler=Shuffles()),
    "batches": lambda data: DataLoader(data, batch_sampler=Pairs(len(data))),
    "iterable": lambda data: DataLoader(Numbered(), batch_size=4),
    "iterable with workers": lambda data: DataLoader(Numbered(), batch_size=4, num_workers=2),
    "own iteration": lambda data: Filtered(data, 4, shuffle=True),
}


@pytest.mark.guarantee
@pytest.mark.parametrize("loader", LOADERS.values(), ids=list(LOADERS))
def test_a_resume_inside_an_epoch_and_more_ranks_see_the_same_samples_and_random_numbers(
    loader, tmp_path
):
    whole, *_ = fit(Plain(loader), tmp_path, steps=13)
    resumed, fed, _ = fit(Plain(loader), tmp_path, steps=13, checkpoint=tmp_path / "7.ckpt")
    assert resumed.steps == whole.steps[7:]
    assert torch.equal(torch.cat(resumed.drawn), torch.cat(whole.drawn)[28:])
    assert "loaded True" in fed.data.calls  # pyright: ignore[reportAttributeAccessIssue]
    parts = [fit(Plain(loader), tmp_path, steps=6, rank=rank, ranks=2)[0] for rank in range(2)]
    assert [a + b for a, b in zip(*(part.steps for part in parts), strict=True)] == whole.steps[:6]


def places(loader, steps, folder):
    """Return what is trained on, as places in the training data, and the feed."""
    task, fed, _ = fit(Plain(loader), folder, steps=steps)
    own = {index: place for place, index in enumerate(fed.data.train.indices)}  # pyright: ignore[reportAttributeAccessIssue]
    return [[own[i] for i in step] for step in task.steps], fed


def test_samplers_are_kept(tmp_path):
    subset, fed = places(LOADERS["subset"], 3, tmp_path)
    assert fed.train_size == 6
    assert sorted(chain(*subset)) == sorted([1, 3, 5, 7, 9, 11] * 2)
    pairs, fed = places(LOADERS["batches"], 10, tmp_path)
    assert all(len({place // 4 for place in step}) == 1 for step in pairs)
    assert fed.drawn_together == "Pairs"
    rolled, _ = places(LOADERS["own epochs"], 10, tmp_path)
    assert [step[0] for step in rolled[::5]] == [0, 19]
    ordered, fed = places(LOADERS["in order"], 5, tmp_path)
    assert fed.drawn_together is None
    assert list(chain(*ordered)) == [*range(20)]


def test_a_split_that_draws_depends_on_the_seed_alone():
    splits = []
    data = {"_target_": f"{__name__}.Plain"}
    for seed in (5, 5, 6):
        torch.rand(1)
        before = torch.get_rng_state()
        fed = feeds.build(OmegaConf.create({"seed": seed, "data": data}))
        fed.set_up()
        # the model's initialization does not depend on the data
        assert torch.equal(torch.get_rng_state(), before)
        splits.append((fed.data.held_out, fed.data.train.indices))  # pyright: ignore
    assert splits[0] == splits[1] != splits[2]


class Stateful(ByEpoch):
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __iter__(self):
        return iter(self.rng.permutation(20))


class Divided(ByEpoch):
    num_replicas = 2


class Reshuffled(IterableDataset):
    def __iter__(self):
        return iter(np.random.default_rng().permutation(10))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            lambda data: DataLoader(data, 4, sampler=Stateful()),
            "Stateful draws other samples the second time",
        ),
        (
            lambda data: DataLoader(data, 4, sampler=Divided()),
            "Divided divides the samples among ranks itself",
        ),
        (
            lambda data: DataLoader(data, batch_sampler=Pairs(20, same=False)),
            "Pairs yields batches of 3 to 4 samples",
        ),
        (lambda data: DataLoader(data, batch_size=None), r"DataLoader\(batch_size=None\)"),
        (
            lambda data: {"a": DataLoader(data, 4)},
            r"Plain.train_dataloader returns a dict: return one torch DataLoader",
        ),
        (
            lambda data: DataLoader(data, 4, sampler=["a", "b"]),
            r"list yields 'a' for a sample.* their places in a list",
        ),
        (
            lambda data: DataLoader(data, batch_sampler=[[(0, 32), (1, 32)]]),
            r"list yields \(0, 32\) for a .*in collate_fn",
        ),
    ],
)
def test_what_cannot_be_repeated_is_refused_by_name(loader, message):
    with pytest.raises(ConfigError, match=message):
        feed(Plain(loader))


def test_a_stream_whose_second_pass_differs_is_named(caplog):
    feed(Plain(lambda data: DataLoader(Reshuffled(), 4)))
    assert "Reshuffled yields other samples in a second pass" in caplog.text


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda **options: DataLoader(Numbers(7), 2, **options),
        lambda **options: DataLoader(Numbered(7), 2, **options),
        lambda **options: DataLoader(
            Numbers(7), batch_sampler=BatchSampler(range(7), 2, **options)
        ),
        lambda **options: DataLoader(Numbers(7), 2, sampler=torch.tensor([*range(7)]), **options),
        lambda drop_last: DataLoader(Numbers(7), batch_sampler=[[*range(6)], [6]][: 2 - drop_last]),
    ],
    ids=["map", "stream", "batch sampler", "tensor", "batches"],
)
def test_evaluation_obeys_drop_last(make, drop_last):
    module: Any = Plain()
    module.val_dataloader = lambda: make(drop_last=drop_last)
    seen = [index for batch in served(module, "val") for index in batch[0].tolist()]
    assert seen == [*range(6 if drop_last else 7)]
    module.val_dataloader = lambda: []  # noqa: PIE807
    assert not feed(module).loaders("val")


class OfRank(Dataset):
    """What it holds, or its noise, is another on each rank; reading may fail."""

    def __init__(self, rank, kind) -> None:
        self.kind, self.rng, self.reads = kind, np.random.default_rng(rank), 0
        self.order = self.rng.permutation(20) if kind == "shuffled" else np.arange(20)
        self.order = self.order[: 20 - rank] if kind == "shorter" else self.order

    def __len__(self):
        return len(self.order)

    def __getitem__(self, index):
        self.reads += 1
        if self.kind == "broken":
            raise OSError("no such file")
        noise = self.rng.normal() if self.kind == "noisy" else torch.rand(()).item()
        return torch.tensor(self.order[index] + noise)


@pytest.mark.parametrize(
    ("kind", "same"),
    [("alike", True), ("noisy", True), ("broken", True), ("shuffled", False), ("shorter", False)],
)
def test_ranks_with_other_data_are_refused_on_all_ranks(kind, same):
    said: list[Any] = []
    for rank in range(2):
        module: Any = Plain(lambda _, rank=rank: DataLoader(OfRank(rank, kind), 4))
        fed = feed(module)
        strategy: Any = Rank(rank, 2)
        strategy.broadcast = lambda own, rank=rank: said.pop(0) if rank else said.append(own) or own
        strategy.reduce_boolean_decision = lambda own, rank=rank: own and (same or rank)
        module.trainer = L.Trainer(strategy=strategy, accelerator="cpu", logger=False)
        fed.samples_seen = 4  # of a run that one process has begun
        if same:
            fed.train_loader()
            continue
        where = "rank 1" if rank else "another rank"
        with pytest.raises(ConfigError, match=f"Plain has other train data on {where} than on"):
            fed.train_loader()


@pytest.mark.parametrize(
    ("size", "ranks", "batch_size", "limit", "remedy"),
    [
        (
            7,
            2,
            1,
            1.0,
            r"Leave 1 of them out \(torch.utils.data.Subset\(dataset, range\(6\)\)\), or type "
            r"data.eval_ba",
        ),
        (2, 3, 8, 1.0, "Give it at least 3 samples, or evaluate on at most 2 ranks"),
        (7, 2, 1, 3, None),  # one more
        (20, 2, 4, 3, None),  # the limit leaves as many as in one process
    ],
)
def test_samples_that_leave_a_rank_without_one_are_refused_at_the_start(
    size, ranks, batch_size, limit, remedy
):
    for rank in (0, 1):
        module: Any = Plain()
        # a plain task does not know that targets of -100 do not count
        labeled = None if remedy is None else lambda numbers: {"targets": torch.ones(len(numbers))}
        module.val_dataloader = lambda of=labeled: DataLoader(
            Numbers(size), batch_size, collate_fn=of
        )
        fed = feed(module, eval_batch_size=batch_size)
        fed.limits = {"val": limit}
        module.trainer = L.Trainer(strategy=Rank(rank, ranks), accelerator="cpu", logger=False)
        if remedy is None:
            (loader,) = fed.loaders("val")
            assert sum(len(batch[0]) for batch in loader) == -(-limit * batch_size // ranks)
            continue
        with pytest.raises(
            ConfigError, match=f"Plain has {size} samples for val, but {ranks} ranks .* {remedy}"
        ):
            fed.loaders("val")


# ------------------------------------------------------------ hooks that look at the data
class Looks(feeding.Recorder):
    """Iterates in the middle of an epoch over the training data, and over the validation data."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Any] = {}

    def training_step(self, batch, batch_idx):
        self.steps.append(batch[0].tolist())
        return self.weight.sum()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 1:
            trainer: Any = self.trainer
            module, loop = trainer.datamodule.train_dataloader(), trainer.train_dataloader
            self.found = {
                "module": [b[0].tolist() for b in module],
                "loop": [b[0].tolist() for b in loop],
                "lengths": (len(module), len(loop)),
                "batch_sizes": (module.batch_size, loop.batch_size),
            }

    def validation_step(self, batch, batch_idx):
        self.validated += batch[0].tolist()
        if batch_idx == 1:
            self.found["val"] = next(iter(self.trainer.val_dataloaders))[0].tolist()  # pyright: ignore


class Simple(L.LightningDataModule):
    def __init__(self, **options) -> None:
        super().__init__()
        self.options, self.scale, self.train = options, 1, Numbers(12)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=4, shuffle=True, **self.options)

    def val_dataloader(self):
        return DataLoader(self.train, batch_size=4, **self.options)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] * self.scale, batch[1]]


class Ours(DataModule):
    def dataset(self, split):
        return [*Numbers(12)]  # pyright: ignore[reportReturnType]


def run(data, *callbacks, **settings):
    """Train for two epochs with our Trainer."""
    module, fed = Looks(), feed(data, **settings)
    trainer = quiet_trainer(
        max_epochs=2,
        reload_dataloaders_every_n_epochs=1,
        accumulate_grad_batches=fed.batches.accumulate,
        callbacks=[fed, *callbacks],
    )
    trainer.fit(module, datamodule=data)
    return module, trainer


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["ours", "plain", "plain persistent"])
def test_a_hook_that_iterates_over_the_data_gets_all_and_takes_nothing_from_the_loop(kind, workers):
    options = {"persistent_workers": True} if kind == "plain persistent" and workers else {}
    settings = {"global_batch_size": 4, "eval_batch_size": 4} if kind == "ours" else {}
    data = Ours() if kind == "ours" else Simple(**options, num_workers=workers)
    module, _ = run(data, num_workers=workers, micro_batch_size=2, **settings)
    assert sorted(chain(*module.steps)) == sorted(2 * [*range(12)])
    second_epoch = module.steps[6:]
    assert module.found.pop("val") == [0, 1, 2, 3]
    assert module.validated == 2 * [*range(12)]
    assert module.found == {
        "module": [second_epoch[i] + second_epoch[i + 1] for i in (0, 2, 4)],
        "loop": second_epoch,
        "lengths": (3, 6),
        "batch_sizes": (4, 2),
    }


class Moves(L.Callback):
    """Changes the data module and its dataset in each epoch, as curricula do."""

    def on_train_epoch_start(self, trainer: Any, pl_module):
        trainer.datamodule.scale = 10
        trainer.datamodule.train.offset = 100 * (trainer.current_epoch + 1)
        assert trainer.train_dataloader.dataset is trainer.datamodule.train


@pytest.mark.parametrize("workers", [0, 1])
def test_what_hooks_set_on_a_data_module_reaches_the_workers_of_the_epoch(workers):
    module, trainer = run(Simple(num_workers=workers), Moves())
    expected = [10 * (i + 100 * epoch) for epoch in (1, 2) for i in range(12)]
    assert sorted(chain(*module.steps)) == expected
    assert type(trainer.datamodule) is Simple  # pyright: ignore[reportAttributeAccessIssue]


# ------------------------------------------------------------ samples
class Ragged(DataModule):
    def dataset(self, split):
        return [torch.ones(i % 3 + 1) for i in range(8)]


class Padded(Ragged):
    def collate_fn(self, samples):
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def test_ragged_samples_need_a_collate_fn():
    with pytest.raises(
        ConfigError, match=r"samples of list cannot be stacked .* collate_fn\(self, samples\)"
    ):
        served(Ragged(), global_batch_size=8)
    for split in ("train", "val"):
        (batch,) = served(Padded(), split, global_batch_size=8, eval_batch_size=8)
        assert batch.shape == (8, 3)


class Streamed(DataModule):
    stream: IterableDataset = Numbered(12)

    def dataset(self, split):
        return self.stream


class Shrinks(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(10 - self.epoch))


class Never(IterableDataset):
    def __iter__(self):
        return repeat(1)


def test_an_iterable_dataset_is_read_as_a_stream(monkeypatch):
    found = [batch[0].tolist() for batch in served(Streamed(), global_batch_size=6)]
    assert found == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    before = random.getstate()
    assert len(iterable.IterableStream(Numbered(10), seed=5, limited=False)) == 10
    assert random.getstate() == before  # counting leaves the global generators as they are
    monkeypatch.setattr(Streamed, "stream", Shrinks())
    fed = feed(Streamed(), global_batch_size=5)
    fed.samples_seen = 10
    with pytest.raises(
        ValueError, match=r"Shrinks ended at record 9 of epoch 1, .* or type data.train_limit=9,"
    ):
        [*fed.train_loader()]


def test_an_endless_iterable_dataset_is_refused_or_limited(monkeypatch):
    monkeypatch.setattr("armature.data.iterable.COUNT_SECONDS", 0.05)
    monkeypatch.setattr(Streamed, "stream", Never())
    with pytest.raises(
        ConfigError, match=r"Never has no __len__ and did not end .* armature.data.stream.Stream"
    ):
        feed(Streamed(), global_batch_size=4)
    assert feed(Streamed(), global_batch_size=4, train_limit=8).train_size == 8


# ------------------------------------------------------------ stages
class ByStage(L.LightningDataModule):
    """As Lightning's page on data modules has it: each stage makes the data of that stage alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: list[str] = []

    def setup(self, stage):
        self.stages.append(stage)
        if stage == "fit":
            self.train, self.val = random_split(Numbers(), [12, 8])
        if stage == "test":
            self.test = Numbers(5)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=4)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=4)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=4)


def test_data_that_another_stage_makes_are_set_up_when_they_are_asked_for():
    trained, measured, predicting, broken = (feeds.Feed(ByStage(), seed=5) for _ in range(4))
    trained.set_up()
    measured.data.setup("validate")
    assert len(measured.loaders("val")[0]) == 2
    assert measured.data.val.indices == trained.data.val.indices  # pyright: ignore
    assert measured.data.stages == ["validate", "fit"]  # pyright: ignore
    predicting.data.setup("predict")
    predicting.predicts()
    assert sum(len(batch[0]) for batch in predicting.loaders("predict")[0]) == 5
    assert predicting.data.stages == ["predict", "test"]  # pyright: ignore
    broken.data.setup("validate")
    with pytest.raises(AttributeError, match="test"):
        broken.loaders("test")
