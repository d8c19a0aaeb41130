"""Feeds a run from a LightningDataModule of somebody else: its datasets, collate functions and
workers, in an order that resumes can repeat.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from hydra.utils import get_object, instantiate
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from typing_extensions import override

from armature import files
from armature.data import labels, memory
from armature.data.batching import LOADER_KEYS
from armature.data.draw import ReadLoader, read_loader
from armature.data.feed import Feed
from armature.data.prefetch import UnchangedLoader
from armature.data.sampler import DrawnSampler, TrainSampler
from armature.data.samples import Samples, seeded
from armature.data.stream import Stream
from armature.errors import ConfigError

log = logging.getLogger(__name__)

# What a data module sees of the Trainer while it is set up, which is before the Trainer is made
BEFORE_TRAINER = SimpleNamespace(
    world_size=1, num_nodes=1, num_devices=1, global_rank=0, local_rank=0, node_rank=0,
    is_global_zero=True, current_epoch=0,
)  # fmt: skip
LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")


class UsersFeed(Feed, L.Callback):
    """Feeds from a LightningDataModule that knows nothing of this project.

    Each hook of its that makes data is called once per stage, with seeded generators, so a
    `random_split` is the same on every rank and after a resume. Whoever calls it again, Lightning
    too, gets the first answer.

    Args:
        module: the data module.
        global_batch_size: None: the batch size of its training loader.
        eval_batch_size: samples per rank and batch; None: the batch size of each loader, divided
            over the ranks.
        num_workers: None: as its loaders have.
    """

    prepares_on_every_rank = False
    tokens_per_sample: int | None = None

    def __init__(
        self,
        module: L.LightningDataModule,
        *,
        global_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        num_workers: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(
            global_batch_size=global_batch_size or 0,
            eval_batch_size=eval_batch_size or 0,
            num_workers=num_workers or 0,
            **settings,
        )
        self.module = module
        self._typed_batch, self._typed_workers = global_batch_size, num_workers
        # of the training data, if a trained model is used
        self._saved_classes: list[str] | None = None
        self._read: ReadLoader | None = None  # the training loader
        self._fed: dict[int, tuple[Any, Any]] = {}  # loaders, and what has taken their places
        self._compared = set[str]()
        for name in ("prepare_data", "setup", *LOADERS):
            if is_overridden(name, module):
                vars(module)[name] = self._once(name, getattr(module, name))

    @property
    @override
    def data(self) -> L.LightningDataModule:
        return self.module

    @property
    def trainer(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        trainer = self.module.trainer
        return trainer if isinstance(trainer, L.Trainer) else None

    # ------------------------------------------------------------ hooks of the module
    def _once(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls the hook once for the same arguments, and keeps the
        answer.
        """
        answers: dict[tuple[str, ...], Any] = {}

        def ask(*args: Any, **kwargs: Any) -> Any:
            stage = tuple(str(getattr(each, "value", each)) for each in (*args, *kwargs.values()))
            if stage not in answers:
                with self._seeded():
                    try:
                        answers[stage] = hook(*args, **kwargs)
                    except AttributeError:
                        if name != "val_dataloader":
                            raise
                        # Lightning's documentation makes validation data for "fit" alone
                        self.module.setup(stage="fit")
                        answers[stage] = hook(*args, **kwargs)
            return answers[stage]

        return ask

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        if self.module.trainer is None:
            self.module.trainer = BEFORE_TRAINER  # pyright: ignore[reportAttributeAccessIssue]
        what = f"the data of {type(self.module).__name__}"
        try:
            with seeded(f"{self.seed}/setup"), memory.reporting(what, self.module):
                yield
        except AttributeError as error:
            if error.obj is not BEFORE_TRAINER:
                raise
            raise ConfigError(
                f"self.trainer.{error.name}: a data module is set up, and its training loader "
                "made, once, before the Trainer is made. Until then only world_size, global_rank "
                "and their like are known. For data that change by epoch, let the dataset read an "
                "attribute of its own, and set it in on_train_epoch_start of the module or a "
                "callback: self.trainer.datamodule.train_set.epoch = self.current_epoch. The size "
                "must stay."
            ) from error
        finally:
            if self.module.trainer is BEFORE_TRAINER:
                self.module.trainer = None

    @property
    def prepare_data_per_node(self) -> bool:
        return self.module.prepare_data_per_node

    def prepare_data(self) -> None:
        self.module.prepare_data()

    def set_up(self, stage: str) -> None:
        """Set up the data of a stage; of "fit", read the training loader as well."""
        self.module.setup(stage=stage)
        if stage == "fit" and self._read is None:
            self._read = self._read_training()

    # ------------------------------------------------------------ state
    @override
    def state_dict(self) -> dict[str, Any]:
        own = {**super().state_dict(), "classes": labels.of_dataset(self._train.dataset)}
        if (draw := self._train.draw) is not None:
            own["drawn"] = draw.state_dict(since=self._drawn_epoch(self.epoch_position()[0]))
        return own

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        then, now = state_dict.get("classes"), labels.of_dataset(self._train.dataset)
        if then and now and then != now:
            raise ConfigError(
                "data: the classes are no longer those that the checkpoint was trained with: "
                f"{labels.difference(then, now)}. Restore the data, or train on these from step 0: "
                "type another run.name, or resume=never."
            )
        super().load_state_dict(state_dict)
        if (draw := self._train.draw) is not None and state_dict.get("seed") == self.seed:
            draw.load_state_dict(state_dict.get("drawn", {}), population=len(self._train.dataset))

    # ------------------------------------------------------------ classes, if the datasets name
    # them
    @property
    def class_names(self) -> list[str] | None:
        names = self._saved_classes or getattr(self.module, "classes", None)
        return names if isinstance(names, list) else None

    @property
    def found_sizes(self) -> dict[str, int]:
        return {}

    def save_assets(self, run_dir: Path) -> None:
        if (names := labels.of_dataset(self._train.dataset)) is not None:
            files.replace(
                run_dir / labels.CLASSES_FILE, json.dumps({"classes": names}, indent=2) + "\n"
            )

    def load_assets(self, run_dir: Path) -> None:
        self._saved_classes = (labels.read(run_dir / labels.CLASSES_FILE) or {}).get("classes")

    def _check_classes(self, dataset: Any, name: str) -> None:
        """Raise ConfigError for targets that mean other classes than in the training data."""
        then, now = self._saved_classes or [], labels.of_dataset(dataset) or []
        numbers = {each: i for i, each in enumerate(then)}
        # new ones and lacking last ones do no harm
        if any(numbers.get(each, i) != i for i, each in enumerate(now)):
            raise ConfigError(
                f"data: the {name} data number other classes than the training data: "
                f"{labels.difference(then, now)}. Each class must have the number that it had then "
                f"({labels.CLASSES_FILE} of the run)."
            )

    # ------------------------------------------------------------ training
    def _read_training(self) -> ReadLoader:
        name = type(self.module).__name__
        if not is_overridden("train_dataloader", self.module):
            raise ConfigError(f"data: {name} has no train_dataloader.")
        read = self._read_loader(self.module.train_dataloader(), "train")
        typed = self._typed_batch
        self.drawn_together = (
            read.draw.name if read.draw is not None and read.draw.whole_batches else None
        )
        if typed is None:
            self.batch_note = f" (batch_size={read.batch_size} of {name} is the global batch)"
        elif self.drawn_together is not None and typed != read.batch_size:
            raise ConfigError(
                f"data.global_batch_size={typed}, but the batch sampler of {name} yields batches "
                f"of {read.batch_size}. Type data.global_batch_size={read.batch_size}, or leave it "
                "out."
            )
        self.global_batch_size = typed or read.batch_size
        self.num_workers = self._workers(read)  # for the advice to a run that waits for data
        return read

    def _read_loader(self, loader: Any, split: str, *, predicting: bool = False) -> ReadLoader:
        return read_loader(
            loader,
            owner=f"{type(self.module).__name__}.{split}_dataloader",
            seed=self.seed,
            training=split == "train",
            limited=split == "train" and self.train_limit is not None,
            predicting=predicting,
        )

    @property
    def _train(self) -> ReadLoader:
        self.set_up("fit")
        assert self._read is not None
        return self._read

    @property
    @override
    def _train_samples(self) -> int:
        read = self._train
        if not len(read.dataset):
            name = type(self.module).__name__
            raise ConfigError(
                f"data: {name} has no training samples: the dataset of train_dataloader is empty."
            )
        return self._limited(len(read.dataset) if read.draw is None else read.draw.size)

    @override
    def _train_sampler(self) -> TrainSampler:
        read = self._train
        if read.draw is None:
            return TrainSampler(self.train_size, shuffled=read.shuffled, **self._order_arguments())
        draw = read.draw.keep
        return DrawnSampler(
            self.train_size, draw=lambda epoch: draw(self._drawn_epoch(epoch)),
            **self._order_arguments() | {"population": len(read.dataset)},
        )  # fmt: skip

    def _drawn_epoch(self, epoch: int) -> int:
        """Return the epoch whose draw an epoch has: limited ones all have the first."""
        return epoch if self.train_limit is None else 0

    # ------------------------------------------------------------ all loaders
    def replace(self, loader: Any) -> Any:
        """Return the loader that takes the place of one of the module's, in the Trainer's stage:
        the same at each call, so that its workers stay alive.
        """
        if isinstance(loader, UnchangedLoader):
            return loader
        if id(loader) not in self._fed:
            split = self.trainer.state.stage.dataloader_prefix
            self._fed[id(loader)] = loader, self._replaced(loader, split)
        return self.ahead(self._fed[id(loader)][1])

    def train_loader(self) -> Any:
        """Return the training loader, without a Trainer."""
        return self._replaced(self.module.train_dataloader(), "train")

    def _replaced(self, loader: Any, split: str, *, predicting: bool = False) -> DataLoader[Any]:
        training = split == "train"
        read = self._train if training else self._read_loader(loader, split, predicting=predicting)
        if training and loader is not read.loader:
            raise ConfigError(
                f"data: the training loader is not the one that {type(self.module).__name__}."
                "train_dataloader returned. Return one DataLoader there."
            )
        self._compare_ranks(read, split)
        if training:
            sampler = self._train_sampler()
        else:
            self._check_classes(read.dataset, split)
            if not len(read.dataset):
                self._say_empty(split, type(self.module).__name__)
            # at least 2 if possible: with 1 a rank may be left without a sample at the end
            size = self.eval_batch_size or max(
                min(2, read.batch_size), read.batch_size // self._rank_and_ranks()[1]
            )
            sampler = self._evaluation_sampler(read.dataset, size, pads=not predicting)
        fed = self.feed(
            read.loader,
            read.dataset,
            sampler,
            collate_fn=read.loader.collate_fn,
            num_workers=self._workers(read),
            foreign=True,
        )
        if training:
            vars(fed)["sampler"] = read.loader.sampler  # whose attributes hooks set
        else:
            self._check_padding(fed, split)
        return fed

    def _workers(self, read: ReadLoader) -> int:
        return read.loader.num_workers if self._typed_workers is None else self._typed_workers

    def predicts(self) -> None:
        """Let the module's loaders for predictions, or else those of its test, be read once, in
        order.

        Lightning would build a DataLoader anew before the strategy gets it.
        """
        module: Any = self.module
        split = "predict" if is_overridden("predict_dataloader", module) else "test"
        loaders = getattr(module, f"{split}_dataloader")

        def predict_dataloader() -> Any:
            if split == "test":
                module.setup(stage="test")
            found = loaders() if is_overridden(f"{split}_dataloader", module) else []
            found = found.iterables if isinstance(found, CombinedLoader) else found
            return _for_each(
                lambda each: UnchangedLoader(
                    self.ahead(self._replaced(each, split, predicting=True))
                ),
                found,
            )

        vars(module)["predict_dataloader"] = predict_dataloader

    # ------------------------------------------------------------ the same data on all ranks
    def _compare_ranks(self, read: ReadLoader, split: str) -> None:
        """Raise ConfigError, on all ranks, if their data are not the same: they divide one order
        of samples. Called by all ranks together.
        """
        rank, ranks = self._rank_and_ranks()
        if ranks == 1:
            return
        strategy, owner = self.trainer.strategy, type(self.module).__name__
        described = len(read.dataset), read.describe()
        own = hashlib.sha256(repr(described).encode()).hexdigest()
        same = own == strategy.broadcast(own)
        if not strategy.reduce_boolean_decision(same):
            raise ConfigError(
                f"data: {owner} has other {split} data on "
                f"{'another rank' if same else f'rank {rank}'} than on rank 0 "
                f"({described[0]} samples on rank {rank}). Let every rank have all samples, in the "
                "same order: they are divided over the ranks later. Draw from no generator of its "
                "own, and sort what comes from a set."
            )
        if self._resumed != (0, 0):  # a dataset may count how often it is read
            return
        digests = _few_digests(read.dataset, seed=self.seed)
        same = digests == strategy.broadcast(digests)
        if not strategy.reduce_boolean_decision(same) and rank == 0:
            log.warning(
                "data: %s has other %s samples on another rank under the same indices. They are "
                "divided over the ranks by index, so some would be used twice and some not at all. "
                "Only augmentation by a generator of the dataset's own may differ: read no rank in "
                "it, shuffle with a seed, and sort names of files.",
                owner, split,
            )  # fmt: skip


def _few_digests(dataset: Any, *, seed: int) -> list[str]:
    """Return digests of the first, middle and last sample; of a stream, of the first three."""
    size = len(dataset)
    places = range(min(3, size)) if isinstance(dataset, Stream) else {0, size // 2, size - 1}
    samples = Samples(
        dataset, size=max(1, size), seed=seed, training=False, collate_fn=lambda each: each,
        foreign=True,
    )  # fmt: skip
    try:
        read: Any = samples.__getitems__(sorted(places)) if size else []
    except Exception as error:  # it may wait for what training starts
        log.debug("samples cannot be read before training: %s", error)
        return []
    return [_digest(sample) for sample in read]


def _digest(sample: Any) -> str:
    checksum = hashlib.sha256()
    for leaf in tree_leaves(sample):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().float().cpu().numpy() if leaf.layout == torch.strided else None
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            checksum.update(np.ascontiguousarray(leaf).data)
        elif isinstance(leaf, int | float):
            checksum.update(repr(leaf).encode())
    return checksum.hexdigest()


def _for_each(function: Callable[[Any], Any], loaders: Any) -> Any:
    """Return what a function makes of one loader, or of each in a dict or list."""
    if isinstance(loaders, Mapping):
        return {key: function(each) for key, each in loaders.items()}
    if isinstance(loaders, Sequence):
        return [function(each) for each in loaders]
    return function(loaders)


def build(cfg: DictConfig) -> Any:
    """Return the feed of a configuration: our data module, or a `UsersFeed` of somebody else's."""
    settings: Any = OmegaConf.to_container(cfg.data, resolve=True)
    with memory.reporting(f"what {cfg.data._target_} makes", settings):
        target: Any = get_object(cfg.data._target_)
        parameters = inspect.signature(target).parameters
        is_feed = isinstance(target, type) and issubclass(target, Feed)
        loader = {
            key: settings.pop(key)
            for key in LOADER_KEYS
            if not is_feed and key in settings and key not in parameters
        }
        made = instantiate(cfg.data if is_feed else settings)
    if isinstance(made, Feed):
        return made
    if not isinstance(made, L.LightningDataModule):
        raise ConfigError(
            f"data._target_={cfg.data._target_} makes a {type(made).__name__}. Name a "
            "LightningDataModule, or a class that derives from armature.data.base.DataModule "
            "(docs/data.md)."
        )
    if "prepare_data_per_node" not in vars(made):  # which the constructor of Lightning's class sets
        raise ConfigError(
            f"data: {type(made).__name__}.__init__ must call super().__init__() first. Add that "
            "line."
        )
    if "global_batch_size" in parameters:
        loader["global_batch_size"] = settings.get("global_batch_size")
    return UsersFeed(made, **{"seed": cfg.seed, **loader})
