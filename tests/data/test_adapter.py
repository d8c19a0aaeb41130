"""Plain LightningDataModules, as people bring them: which samples a run sees, in which order, also
after a resume.
"""

import itertools
import random
import threading
from itertools import chain
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import OmegaConf
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from armature.data import adapter
from armature.data.adapter import PlainData
from armature.data.base import DataModule
from armature.data.batching import plan_batches
from armature.data.loaders import Draw
from armature.errors import ConfigError
from tests.data.test_data_module import RestoreProgress, SaveEveryStep

pytestmark = pytest.mark.filterwarnings("ignore:.*dataloader is not resumable.*")


class Numbers(Dataset):
    """Sample i is (i, a random number).

    It has attributes that mean something else in our own datasets.
    """

    augment = True

    def __init__(self, size: int = 20) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int):
        if index >= self.size:
            raise IndexError(index)
        return index, random.random() + np.random.rand() + torch.rand(()).item()

    def batch(self, batch_size: int):
        raise AssertionError("the dataset's own method, which has another meaning")


class Plain(L.LightningDataModule):
    """As in Lightning's documentation; `loader` makes the training loader."""

    def __init__(
        self, loader=None, *, size: int = 20, batch_size: int = 4, num_workers: int = 0
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["loader"])
        self.make = loader or (
            lambda data: DataLoader(data, batch_size=self.per_device, shuffle=True)
        )
        self.calls: list[str] = []

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
        return [
            DataLoader(self.val, batch_size=3),
            DataLoader(Numbers(5), batch_size=2, shuffle=True),
        ]

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

    def on_exception(self, exception):
        self.calls.append("on_exception")

    @property
    def classes(self):
        return 10


class Recorder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.steps: list[list[int]] = []
        self.drawn: list[float] = []
        self.validated: list[tuple[int, list[int]]] = []
        self.tested: list[int] = []

    def training_step(self, batch, batch_idx):
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.steps.append([])
        self.steps[-1] += batch[0].tolist()
        self.drawn += batch[1].tolist()
        assert self.trainer.datamodule.classes == 10
        assert batch[2] == "hooked"
        return self.weight.sum()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.validated.append((dataloader_idx, batch[0].tolist()))

    def test_step(self, batch, batch_idx):
        self.tested += batch[0].tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OneOf(SingleDeviceStrategy):
    """Pretends to be one rank of several."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__("cpu")
        self.place = {"rank": rank, "num_replicas": ranks}

    @property
    def distributed_sampler_kwargs(self):
        return self.place


def fit(module, folder, *, steps, rank=0, ranks=1, checkpoint=None, task=None, **settings):
    data = PlainData(module, **{"seed": 5, **settings})
    data.prepare_data()
    data.setup("fit")
    batches = plan_batches(data.global_batch_size, data.micro_batch_size, ranks)
    task = task or Recorder()
    trainer = L.Trainer(
        strategy=OneOf(rank, ranks),
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        accumulate_grad_batches=batches.accumulate,
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=[RestoreProgress() if checkpoint or ranks > 1 else SaveEveryStep(folder)],
    )
    trainer.fit(task, datamodule=data, ckpt_path=checkpoint, weights_only=False)
    return task, data, trainer


def test_a_plain_data_module_trains_on_each_sample_once_per_epoch_and_its_hooks_are_called_once(
    tmp_path,
):
    module = Plain()
    task, data, trainer = fit(module, tmp_path, steps=10)
    assert data.global_batch_size == 4
    assert data.batch_note == " (batch_size=4 of Plain is the global batch)"
    first, second = (list(chain(*task.steps[k : k + 5])) for k in (0, 5))
    own = sorted(module.train.indices)
    assert sorted(first) == sorted(second) == own
    assert first != own
    assert first != second
    assert module.calls == ["prepare_data", "setup fit", "teardown fit"]
    trainer.test(task, datamodule=data, verbose=False)
    assert task.tested == list(range(9))
    assert module.calls[3:] == ["setup test", "teardown test"]
    assert data.hparams["batch_size"] == 4
    loaders = {
        loader: [i for which, batch in task.validated if which == loader for i in batch]
        for loader in (0, 1)
    }
    assert loaders[0] == list(module.val.indices) * 2
    assert sorted(loaders[1][:5]) == list(range(5))


def test_its_own_batch_is_the_one_that_is_learned_over_and_over(tmp_path):
    task, *_ = fit(Plain(), tmp_path, steps=3, train_limit="batch")
    assert len(task.steps[0]) == 4
    assert sorted(task.steps[0]) == sorted(task.steps[1]) == sorted(task.steps[2])


def batch_sampler(data):
    return DataLoader(data, batch_sampler=Pairs(len(data)))


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


class Numbered(IterableDataset):
    """Divides its samples among workers, as torch's documentation says, and draws random
    numbers.
    """

    def __init__(self, size: int = 20) -> None:
        self.size = size

    def __iter__(self):
        info = get_worker_info()
        for i in range(
            0 if info is None else info.id, self.size, 1 if info is None else info.num_workers
        ):
            yield i, torch.rand(()).item() + random.random()


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
    "batches": batch_sampler,
    "iterable": lambda data: DataLoader(Numbered(), batch_size=4),
    "iterable with workers": lambda data: DataLoader(Numbered(), batch_size=4, num_workers=2),
}


@pytest.mark.guarantee
@pytest.mark.parametrize("loader", LOADERS.values(), ids=list(LOADERS))
def test_a_resume_inside_an_epoch_and_more_ranks_see_the_same_samples_and_random_numbers(
    loader, tmp_path
):
    whole, _, _ = fit(Plain(loader), tmp_path, steps=13)
    resumed, data, _ = fit(Plain(loader), tmp_path, steps=13, checkpoint=tmp_path / "7.ckpt")
    assert resumed.steps == whole.steps[7:]
    assert resumed.drawn == whole.drawn[28:]
    assert "loaded True" in data.module.calls
    parts = [fit_rank(Plain(loader), tmp_path, rank)[0] for rank in range(2)]
    assert [a + b for a, b in zip(*(part.steps for part in parts), strict=True)] == whole.steps[:6]


def fit_rank(module, folder, rank):
    return fit(module, folder, steps=6, rank=rank, ranks=2)


def test_samplers_are_kept(tmp_path):
    weighted, _, _ = fit(Plain(LOADERS["weighted"]), tmp_path, steps=20)
    heavy = Plain(LOADERS["weighted"])
    heavy.setup("fit")
    assert len(set(chain(*weighted.steps))) < 20 or len(weighted.steps) == 20
    subset, data, _ = fit(Plain(LOADERS["subset"]), tmp_path, steps=3)
    assert data.train_size == 6
    assert sorted(chain(*subset.steps)) == sorted(
        [data.module.train.indices[i] for i in (1, 3, 5, 7, 9, 11)] * 2
    )
    pairs, data, _ = fit(Plain(batch_sampler), tmp_path, steps=10)
    own = {index: place for place, index in enumerate(data.module.train.indices)}
    assert all(len({own[i] // 4 for i in step}) == 1 for step in pairs.steps)
    assert data.drawn_together == "Pairs"
    rolled, data, _ = fit(Plain(LOADERS["own epochs"]), tmp_path, steps=10)
    own = {index: place for place, index in enumerate(data.module.train.indices)}
    assert [own[step[0]] for step in rolled.steps[::5]] == [0, 19]
    ordered, data, _ = fit(Plain(LOADERS["in order"]), tmp_path, steps=5)
    assert data.drawn_together is None
    assert list(chain(*ordered.steps)) == data.module.train.indices


def test_what_is_drawn_twice_has_its_own_random_numbers(tmp_path):
    module = Plain(
        lambda data: DataLoader(data, batch_size=4, sampler=RandomSampler(range(1), True, 8))
    )
    task, _, _ = fit(module, tmp_path, steps=4)
    assert len(set(chain(*task.steps))) == 1
    assert len(set(task.drawn)) == 16


def test_the_split_of_an_unseeded_random_split_depends_on_the_seed_alone():
    splits = []
    for seed, draws in ((5, 0), (5, 3), (6, 0)):
        torch.rand(draws)
        module = Plain()
        before = torch.get_rng_state()
        PlainData(module, seed=seed).setup("fit")
        assert torch.equal(
            torch.get_rng_state(), before
        )  # the model's initialization does not depend on the data
        splits.append(module.train.indices)
    assert splits[0] == splits[1] != splits[2]


def test_typed_sizes_win(tmp_path):
    task, data, _ = fit(
        Plain(), tmp_path, steps=3, global_batch_size=8, micro_batch_size=2, eval_batch_size=7
    )
    assert [len(step) for step in task.steps] == [8, 8, 8]
    assert data.batch_note == ""
    assert task.validated == [] or len(task.validated[0][1]) == 7


def test_a_distributed_sampler_of_torch_is_replaced_by_our_share():
    module = Plain(
        lambda data: DataLoader(data, 4, sampler=DistributedSampler(data, num_replicas=2, rank=1))
    )
    data = PlainData(module, seed=5)
    data.setup("fit")
    assert data.train_size == 20
    assert data._train_sampler().shuffled


class Stateful(ByEpoch):
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __iter__(self):
        return iter(self.rng.permutation(20))


class Endless(ByEpoch):
    __len__ = None

    def __iter__(self):
        while True:
            yield 0


class Divided(ByEpoch):
    num_replicas = 2


class PerClass(ByEpoch):
    """pytorch-metric-learning's MPerClassSampler: shuffles in place what it keeps."""

    def __init__(self):
        self.labels = np.arange(20)

    def __iter__(self):
        np.random.shuffle(self.labels)
        return iter(self.labels.tolist())


class Weighted(PerClass):
    """Changes as it draws, and so do its weights while training."""

    def __init__(self):
        super().__init__()
        self.only = None

    def __iter__(self):
        return super().__iter__() if self.only is None else iter([self.only] * 20)


@pytest.mark.parametrize("kept", [True, False], ids=["keeps its state", "changes as it draws"])
def test_weights_that_change_count_from_the_next_draw_on_and_a_resume_repeats_the_last(kept):
    sampler = WeightedRandomSampler([1.0] * 20, 20) if kept else Weighted()

    def change(only):
        if isinstance(sampler, Weighted):
            sampler.only = only
        else:
            sampler.weights = torch.eye(20)[only]

    draw = Draw(sampler, owner="mine", seed=0, whole_batches=False)
    change(3)
    assert set(draw.keep(0).tolist()) == {3}
    change(4)
    assert set(draw.keep(0).tolist()) == set(draw(0).tolist()) == {3}
    saved = draw.state_dict(since=0)
    assert set(draw.keep(1).tolist()) == {4}
    assert {epoch: drawn.dtype for epoch, drawn in saved.items()} == {0: torch.int32}
    assert draw.state_dict(since=1).keys() == {1}
    resumed = Draw(Weighted(), owner="mine", seed=0, whole_batches=False)
    resumed.load_state_dict(saved, population=20)
    assert set(resumed.keep(0).tolist()) == {3}
    resumed.load_state_dict(saved, population=3)  # the data have changed
    assert len(set(resumed.keep(0).tolist())) == 20


class OtherLoader(DataLoader):
    def __iter__(self):
        return super().__iter__()


class Filtered(DataLoader):
    """As PyTorch Geometric's NeighborLoader, which changes batches in the main process."""

    def _get_iterator(self):
        return map(sum, super()._get_iterator())


class Short(DataLoader):
    def __len__(self):
        return 2


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            lambda data: DataLoader(data, 4, sampler=Stateful()),
            "Stateful draws other samples the second time",
        ),
        (lambda data: DataLoader(data, 4, sampler=Endless()), "Endless has no length"),
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
            lambda data: OtherLoader(data, 4),
            "OtherLoader, whose own __iter__ decides what a batch holds",
        ),
        (
            lambda data: Filtered(data, 4),
            "Filtered, whose own _get_iterator decides what a batch holds",
        ),
        (lambda data: Short(data, 4), "Short, whose own __len__ decides how long an epoch is"),
        (lambda data: DataLoader(data, 4, sampler=SubsetRandomSampler([])), "yields no samples"),
        (
            lambda data: DataLoader(data, 4, sampler=["a", "b"]),
            r"list yields 'a' for a sample.* their places in a list",
        ),
        (lambda data: DataLoader(data, 4, sampler=[0.5, 1.5]), r"list yields 0.5 for a sample"),
        (
            lambda data: DataLoader(data, batch_sampler=[[(0, 32), (1, 32)]]),
            r"list yields \(0, 32\) for a .*in collate_fn",
        ),
        (
            lambda data: DataLoader(data, batch_sampler=[0, 1]),
            r"list yields 0\. A batch sampler yields lists",
        ),
    ],
)
def test_what_cannot_be_repeated_is_refused_by_name(loader, message):
    with pytest.raises(ConfigError, match=message):
        PlainData(Plain(loader), seed=5).setup("fit")


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
    ],
    ids=["map", "stream", "batch sampler", "tensor"],
)
def test_evaluation_obeys_drop_last(make, drop_last):
    data = PlainData(Plain(), seed=5)
    data.module.val_dataloader = lambda: make(drop_last=drop_last)
    data.setup("fit")
    seen = [index for batch in data.val_dataloader() for index in batch[0].tolist()]
    assert seen == [*range(6 if drop_last else 7)]


def test_a_batch_sampler_fixes_the_global_batch():
    with pytest.raises(
        ConfigError,
        match=r"data.global_batch_size=8, but the batch sampler of Plain yields batches of 4",
    ):
        PlainData(Plain(batch_sampler), seed=5, global_batch_size=8).setup("fit")


@pytest.mark.parametrize(
    ("rank", "same", "where"), [(1, False, "rank 1"), (0, True, "another rank")]
)
def test_ranks_with_other_data_are_refused_on_all_ranks(rank, same, where):
    strategy: Any = OneOf(rank, 2)
    strategy.broadcast = lambda obj, src=0: obj if same else "other"
    strategy.reduce_boolean_decision = lambda decision: False
    data = PlainData(Plain(), seed=5)
    data.setup("fit")
    data.trainer = type("Trainer", (), {"strategy": strategy, "accumulate_grad_batches": 1})()
    with pytest.raises(ConfigError, match=f"other training data on {where} than on rank 0"):
        data.train_dataloader()


class TrainOnly(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Numbers(), 4)


class OfRank(Dataset):
    """What it holds, or its noise, is another on each rank; reading may fail."""

    def __init__(self, rank, kind) -> None:
        self.kind, self.values, self.reads = kind, torch.arange(20.0), []
        self.rng = np.random.default_rng(rank)
        if kind == "shuffled":
            self.values = self.values[self.rng.permutation(20)]
        elif kind == "rounded":
            self.values += 1e-6 * rank

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        self.reads.append(index)
        if self.kind == "noisy":
            return self.values[index] + self.rng.normal()
        if self.kind == "broken":
            raise OSError("no such file")
        return self.values[index] + torch.rand(()), f"/local/{id(self)}/{index}.png"


def check_ranks_agree(datasets, *, workers=0):
    """Let two ranks compare their training data, one after the other: rank 0 as if the first
    samples differed.
    """
    said: list[Any] = []
    decisions = iter([True, False, True])
    for rank, own in enumerate(datasets):
        data = PlainData(Plain(lambda _, own=own: DataLoader(own, 4, num_workers=workers)), seed=5)
        data.setup("fit")
        strategy: Any = OneOf(rank, 2)
        strategy.broadcast = lambda own, src=0, rank=rank: (
            said.pop(0) if rank else said.append(own) or own
        )
        strategy.reduce_boolean_decision = lambda own, rank=rank: own if rank else next(decisions)
        data.trainer = SimpleNamespace(strategy=strategy)
        data.check_ranks_agree("train")


class RarelyFlipped(Dataset):
    """Augments few of its samples, by a generator of its own."""

    def __init__(self, seed, size=20, chance=0.05) -> None:
        self.rng, self.size, self.chance = np.random.default_rng(seed), size, chance

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        value = torch.arange(8.0) + index
        return value.flip(-1) if self.rng.random() < self.chance else value


@pytest.mark.parametrize(("size", "chance"), [(20, 0.05), (20, 0.5), (3, 0.1)])
def test_rare_augmentation_by_a_generator_of_the_dataset_is_not_taken_for_other_data(size, chance):
    for seed in range(40):
        check_ranks_agree([RarelyFlipped([seed, rank], size, chance) for rank in range(2)])


def test_rare_augmentation_in_loader_processes_is_not_taken_for_other_data():
    flipped = (
        seed for seed in range(100) if np.random.default_rng([seed, 0]).random(3).min() < 0.05
    )
    for seed in itertools.islice(flipped, 2):  # among the first three samples of rank 0
        check_ranks_agree([RarelyFlipped([seed, rank]) for rank in range(2)], workers=1)


class Waiting(Numbers):
    """Waits for what training starts: in loader processes for ever, else once."""

    seconds = 0.4

    def __getitem__(self, index):
        threading.Event().wait(None if get_worker_info() else self.seconds)
        self.seconds = 0.0
        return super().__getitem__(index)


def test_a_resumed_run_reads_no_samples_before_training():
    data, own = PlainData(Plain(lambda _: DataLoader(own, 4)), seed=5), OfRank(0, "same")
    data.setup("fit")
    data._resumed = (8, 2)
    strategy: Any = OneOf(0, 2)
    strategy.broadcast, strategy.reduce_boolean_decision = (
        lambda own, src=0: own,
        lambda decision: decision,
    )
    data.trainer = SimpleNamespace(strategy=strategy)
    data.check_ranks_agree("train")
    assert own.reads == []


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
        (8, 2, 1, 1.0, None),
        (7, 2, 2, 1.0, None),
        (7, 2, 1, 3, None),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_samples_that_leave_a_rank_without_one_are_refused_at_the_start(
    size, ranks, batch_size, limit, remedy, rank
):
    data = PlainData(Plain(), seed=5)
    data.module.val_dataloader = lambda: DataLoader(Numbers(size), batch_size)
    data.setup("fit")
    data.trainer = SimpleNamespace(strategy=OneOf(rank, ranks), limit_val_batches=limit)
    if remedy is None:
        taken = itertools.islice(data.val_dataloader(), limit if isinstance(limit, int) else None)
        assert all(len(batch[0]) for batch in taken)
        return
    with pytest.raises(
        ConfigError, match=f"Plain has {size} samples for val, but {ranks} ranks .* {remedy}"
    ):
        data.val_dataloader()


def test_a_hook_may_ask_for_the_data_on_one_rank_alone():
    strategy, loop = OneOf(0, 2), SimpleNamespace(asks_for_data=False)
    strategy.broadcast = lambda obj, src=0: pytest.fail("the other rank is not there")
    data = PlainData(Plain(), seed=5)
    data.setup("fit")
    data.trainer = SimpleNamespace(strategy=strategy, accumulate_grad_batches=1, fit_loop=loop)
    assert len(data.train_dataloader())


def test_a_hook_s_loader_counts_optimizer_steps_whatever_the_micro_batch(caplog):
    caplog.set_level("INFO", "armature")
    data = PlainData(Plain(), seed=5, micro_batch_size=1)
    data.setup("fit")
    data.trainer = SimpleNamespace(
        strategy=OneOf(0, 2), fit_loop=SimpleNamespace(asks_for_data=False)
    )
    size = data.global_batch_size
    for _ in range(2):
        loader = data.train_dataloader()
        assert [len(loader), loader.batch_size] == [-(-data.train_size // size), size]
    assert [record.getMessage() for record in caplog.records] == [
        f"trainer.datamodule.train_dataloader() has batches of data.global_batch_size={size} "
        "samples: a "
        "forward of one may need more memory than a step. Its length counts optimizer steps: do "
        "not divide it by "
        f"trainer.accumulate_grad_batches={size // 2}."
    ]


def test_the_number_of_workers_is_that_of_the_training_loader():
    data = PlainData(Plain(LOADERS["workers"]), seed=5)
    data.setup("fit")
    data.trainer = type(
        "Trainer", (), {"strategy": SingleDeviceStrategy(), "accumulate_grad_batches": 1}
    )()
    data.train_dataloader()
    assert data.num_workers == 2  # what the advice to a run that waits for data is about


def config(**data):
    return OmegaConf.create({"seed": 3, "data": {"_target_": f"{__name__}.Plain", **data}})


def test_loaders_that_the_module_lacks_are_not_claimed():
    data = PlainData(TrainOnly())
    assert not is_overridden("test_dataloader", data)
    assert not is_overridden("val_dataloader", data)
    assert is_overridden("val_dataloader", PlainData(Plain()))


class Same(Sampler):
    """A batch sampler: one sample over and over."""

    only = 0

    def __len__(self):
        return 5

    def __iter__(self):
        return iter([[self.only] * 4] * 5)


class ShufflesInPlace(Sampler):
    def __init__(self):
        self.order = [*range(20)]

    def __len__(self):
        return 20

    def set_epoch(self, epoch):
        random.shuffle(self.order)

    def __iter__(self):
        random.shuffle(self.order)
        return iter(self.order)


def test_hooks_reach_the_user_s_samplers_through_the_loader():
    def training_loader(loader, micro=None):
        data = PlainData(Plain(loader), seed=5, micro_batch_size=micro or "auto")
        data.setup("fit")
        return data.train_dataloader()

    def places(loader):
        return {loader.dataset.indices.index(i) for batch in loader for i in batch[0].tolist()}

    weighted = training_loader(LOADERS["weighted"], micro=2)
    for sampler in (weighted.sampler, weighted.batch_sampler.sampler):
        assert isinstance(sampler, WeightedRandomSampler)
        sampler.weights = torch.eye(20)[3]
    assert places(weighted) == {3}
    assert weighted.batch_sampler.batch_size == weighted.batch_size == 2
    with pytest.raises(
        ConfigError,
        match=r"batch_sampler.batch_size was set to 8, .* data.global_batch_size=4 .* Type",
    ):
        weighted.batch_sampler.batch_size = 8
    shuffles = ShufflesInPlace()
    order = [*shuffles.order]
    loader = training_loader(lambda data: DataLoader(data, 4, sampler=shuffles))
    _set_sampler_epoch(loader, 1)  # Lightning's, at each epoch's start
    assert sorted(loader.sampler) == order == shuffles.order
    same = training_loader(lambda data: DataLoader(data, batch_sampler=Same()))
    same.batch_sampler.only += 7
    assert places(same) == {7}
    assert isinstance(training_loader(None).sampler, RandomSampler)


def test_something_else_is_refused():
    cfg = OmegaConf.create({"seed": 0, "data": {"_target_": "torch.nn.Identity"}})
    with pytest.raises(ConfigError, match=r"data._target_=torch.nn.Identity makes a Identity"):
        adapter.build(cfg)


# ------------------------------------------------------------ in our own data modules
class Ragged(DataModule):
    def dataset(self, split):
        return [torch.ones(i % 3 + 1) for i in range(8)]


class Padded(Ragged):
    def collate_fn(self, samples):
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


class Streamed(DataModule):
    def dataset(self, split):
        return Numbered(12)


class Never(IterableDataset):
    def __iter__(self):
        while True:
            yield 1


def test_ragged_samples_need_a_collate_fn():
    with pytest.raises(
        ConfigError, match=r"samples of list cannot be stacked .* collate_fn\(self, samples\)"
    ):
        next(iter(Ragged(global_batch_size=8).train_dataloader()))
    assert next(iter(Padded(global_batch_size=8).train_dataloader())).shape == (8, 3)
    assert next(iter(Padded(global_batch_size=8, eval_batch_size=8).val_dataloader())).shape == (
        8,
        3,
    )


def test_an_iterable_dataset_is_read_as_a_stream():
    data = Streamed(global_batch_size=4)
    assert data.train_size == 12
    assert [batch[0].tolist() for batch in data.train_dataloader()] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]


def test_an_endless_iterable_dataset_is_refused_or_limited(monkeypatch):
    monkeypatch.setattr("armature.data.iterable.COUNT_SECONDS", 0.05)
    data = Streamed(global_batch_size=4)
    monkeypatch.setattr(Streamed, "dataset", lambda self, split: Never())
    with pytest.raises(
        ConfigError, match=r"Never has no __len__ and did not end .* armature.data.stream.Stream"
    ):
        _ = data.train_size
    assert Streamed(global_batch_size=4, train_limit=8).train_size == 8


class Counting(IterableDataset):
    """Each pass has another order, by a counter or by a generator that draws on."""

    def __init__(self, record) -> None:
        self.epoch, self.record, self.rng = 0, record, np.random.default_rng(0)

    def __len__(self):
        return 12

    def __iter__(self):
        self.epoch += 1
        return (self.record(self, i) for i in range(12))


@pytest.mark.parametrize(
    "value", [torch.tensor([1.0, float("nan")]), np.array([float("nan")]), float("nan"), object]
)
def test_an_iterable_dataset_with_values_that_equal_nothing_is_read(value, monkeypatch):
    monkeypatch.setattr(Streamed, "dataset", lambda self, split: Counting(lambda self, i: value))
    assert Streamed(global_batch_size=4).train_size == 12


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
    trained, measured, predicting, tested = (PlainData(ByStage(), seed=5) for _ in range(4))
    trained.setup("fit")
    measured.setup("validate")
    assert len(measured.val_dataloader()) == 2
    assert measured.module.val.indices == trained.module.val.indices  # the same split
    assert measured.module.stages == ["validate", "fit"]
    predicting.setup("predict")
    assert sum(len(batch[0]) for batch in predicting.predict_dataloader()) == 5
    assert predicting.module.stages == ["predict", "test"]
    tested.setup("test")
    assert len(tested.predict_dataloader()) == 2
    assert tested.module.stages == ["test"]
    broken = PlainData(ByStage(), seed=5)
    broken.setup("validate")
    with pytest.raises(AttributeError, match="test"):
        broken.test_dataloader()
