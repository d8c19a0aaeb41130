"""Run a plain LightningDataModule: its datasets, collate functions and workers, in an order that
resumes can repeat.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from hydra.utils import get_object
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Dataset
from typing_extensions import override

from armature import files
from armature.data import folds, labels, memory, ranks_agree
from armature.data.base import DataModule, Split
from armature.data.batching import FOLD_KEYS, LOADER_KEYS
from armature.data.eval_loader import check_padding
from armature.data.loaders import OF_WORKERS, ReadLoader, read_loader
from armature.data.one_process import OneProcess
from armature.data.prefetch import TRANSFER_HOOKS, UnchangedLoader
from armature.data.sampler import DrawnSampler, TrainSampler
from armature.data.samples import seeded
from armature.data.stream import Stream
from armature.data.users_view import UsersView
from armature.errors import ConfigError
from armature.validation.composing import instantiate


def build(cfg: DictConfig) -> DataModule:
    """Return the data module of a configuration; a LightningDataModule that is not ours comes in a
    `PlainData`.
    """
    settings: Any = OmegaConf.to_container(cfg.data, resolve=True)
    with memory.reporting(f"what {cfg.data._target_} makes", settings):
        return _build(cfg)


def _build(cfg: DictConfig) -> DataModule:
    target: Any = get_object(cfg.data._target_)
    node: dict[str, Any] = OmegaConf.to_container(cfg.data, resolve=True)  # pyright: ignore[reportAssignmentType]
    parameters = inspect.signature(target).parameters
    fold = {key: node.pop(key) for key in FOLD_KEYS if key in node and key not in parameters}
    if isinstance(target, type) and issubclass(target, DataModule):
        made = instantiate(node)
        folds.hold_out(made, fold)
        return made
    loader = {key: node.pop(key) for key in LOADER_KEYS if key in node and key not in parameters}
    made = instantiate(node)
    if isinstance(made, DataModule):
        return made
    if not isinstance(made, L.LightningDataModule):
        raise ConfigError(
            f"data._target_={cfg.data._target_} makes a {type(made).__name__}. Name a "
            "LightningDataModule, or a class "
            "that derives from armature.data.base.DataModule (docs/data.md)."
        )
    if "prepare_data_per_node" not in vars(made):  # which the constructor of Lightning's class sets
        raise ConfigError(
            f"data: {type(made).__name__}.__init__ must call super().__init__() first. Add that "
            "line."
        )
    if "global_batch_size" in parameters:
        loader["global_batch_size"] = node.get("global_batch_size")
    folds.hold_out(made, fold)
    return PlainData(made, **{"seed": cfg.seed, **loader})


class PlainData(DataModule):
    """Wraps a LightningDataModule that knows nothing of this project.

    Its hooks are called as in one process (`trainer.world_size` is 1), once per stage, with seeded
    generators, so a `random_split` is the same on every rank and after a resume. Its loaders are
    read (data/loaders.py) and replaced.

    Args:
        module: the data module.
        global_batch_size: None: the batch size of its training loader.
        eval_batch_size: samples per rank and batch; None: the batch size of each loader, divided
            over the ranks.
        num_workers: None: as its loaders have.
    """

    prepares_on_every_rank = False

    def __init__(
        self,
        module: L.LightningDataModule,
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | str = "auto",
        eval_batch_size: int | None = None,
        num_workers: int | None = None,
        seed: int = 0,
        train_limit: int | str | None = None,
        skip_steps: Sequence[int] = (),
    ) -> None:
        self.__dict__["module"] = module
        super().__init__(
            global_batch_size=global_batch_size or 0,
            micro_batch_size=micro_batch_size,
            eval_batch_size=eval_batch_size or 0,
            num_workers=num_workers or 0,
            seed=seed,
            train_limit=train_limit,
            skip_steps=skip_steps,
        )
        self._typed = {"global_batch_size": global_batch_size, "num_workers": num_workers}
        self._stages: set[str] = set()
        self._prepared = False
        self._read: dict[str, Any] = {}
        # of the training data, if a trained model is used
        self._saved_classes: list[str] | None = None
        self.prepare_data_per_node = module.prepare_data_per_node
        self._ranks_agree: set[Split] = set()  # the last of our own: see `__setattr__`
        for name in TRANSFER_HOOKS:  # Lightning asks whether they are overridden
            if is_overridden(name, module):
                self.__dict__[name] = getattr(module, name)
        for name in ("val_dataloader", "test_dataloader"):  # the same question
            if not is_overridden(name, module):
                self.__dict__[name] = getattr(module, name)

    # ------------------------------------------------------------ the module behind
    def users_view(self) -> UsersView:
        """Return what users get as `trainer.datamodule`."""
        return UsersView(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what is not an attribute of this class on the module, where its own code reads it."""
        if (
            "_ranks_agree" not in self.__dict__
            or name in self.__dict__
            or hasattr(type(self), name)
        ):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    @property
    def trainer(self) -> Any:
        return self.__dict__.get("_trainer")

    @trainer.setter
    def trainer(self, trainer: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.__dict__["_trainer"] = self.module.trainer = trainer

    @property
    def hparams(self) -> Any:
        return self.module.hparams

    @property
    def hparams_initial(self) -> Any:
        return self.module.hparams_initial

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let the module see one process, or it would divide its batches and samples itself."""
        trainer, self.module.trainer = self.trainer, OneProcess(self.trainer)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            what = f"the data of {type(self.module).__name__}"
            with seeded(f"{self.seed}/setup"), memory.reporting(what, self.module):
                yield
        finally:
            self.module.trainer = trainer

    # ------------------------------------------------------------ hooks
    @override
    def prepare_data(self) -> None:
        if not self._prepared:
            with self._alone():
                self.module.prepare_data()
        self._prepared = True

    @override
    def setup(self, stage: str) -> None:
        if stage in self._stages:
            return
        self._set_up(stage)
        self._stages.add(stage)
        if stage == "fit":
            self._read_training()

    def _set_up(self, stage: str) -> None:
        with self._alone():
            self.module.setup(stage=stage)  # as Lightning calls it

    @override
    def teardown(self, stage: str) -> None:
        self._stages.discard(stage)
        self.module.teardown(stage=stage)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.module.on_exception(exception)

    @override
    def state_dict(self) -> dict[str, Any]:
        read: ReadLoader = self._read["train"]
        drawn = (
            {}
            if read.draw is None
            else read.draw.state_dict(since=self._drawn_epoch(self.epoch_position()[0]))
        )
        own = {
            "module": self.module.state_dict(),
            "classes": labels.of_dataset(read.dataset),
            "drawn": drawn,
        }
        return {**super().state_dict(), **own}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        then, now = state_dict.get("classes"), labels.of_dataset(self._read["train"].dataset)
        if then and now and then != now:
            raise ConfigError(
                "data: the classes are no longer those that the checkpoint was trained with: "
                f"{labels.difference(then, now)}. Restore the data, or train on these from step 0: "
                "type another "
                "run.name, or resume=never."
            )
        super().load_state_dict(state_dict)
        if state_dict.get("module"):
            self.module.load_state_dict(state_dict["module"])
        read: ReadLoader = self._read["train"]
        if read.draw is not None and state_dict.get("seed") == self.seed:
            read.draw.load_state_dict(state_dict.get("drawn", {}), population=len(read.dataset))

    # ------------------------------------------------------------ classes, if the datasets name
    # them
    @property
    @override
    def class_names(self) -> list[str] | None:
        return self._saved_classes or super().class_names

    @override
    def save_assets(self, run_dir: Path) -> None:
        if (names := labels.of_dataset(self._read["train"].dataset)) is not None:
            files.replace(
                run_dir / labels.CLASSES_FILE, json.dumps({"classes": names}, indent=2) + "\n"
            )

    @override
    def load_assets(self, run_dir: Path) -> None:
        self._saved_classes = (labels.read(run_dir / labels.CLASSES_FILE) or {}).get("classes")

    def _check_classes(self, read: ReadLoader, name: str) -> None:
        """Raise ConfigError for targets that mean other classes than in the training data."""
        then, now = self._saved_classes or [], labels.of_dataset(read.dataset) or []
        numbers = {each: i for i, each in enumerate(then)}
        # new ones and lacking last ones do no harm
        if any(numbers.get(each, i) != i for i, each in enumerate(now)):
            raise ConfigError(
                f"data: the {name} data number other classes than the training data: "
                f"{labels.difference(then, now)}. "
                f"Each class must have the number that it had then ({labels.CLASSES_FILE} of the "
                "run)."
            )

    # ------------------------------------------------------------ loaders
    def _loaders_of(self, split: str) -> Any:
        """Return what the module's `<split>_dataloader` returns, or None if it has none."""
        name = f"{split}_dataloader"
        if not is_overridden(name, self.module):
            return None
        try:
            with self._alone():
                loaders = getattr(self.module, name)()
        except AttributeError:
            if split != "val" or "fit" in self._stages:
                raise
            self._set_up("fit")  # Lightning's documentation makes validation data there alone
            with self._alone():
                loaders = getattr(self.module, name)()
        one_after_another = (
            split != "train"
            and isinstance(loaders, CombinedLoader)
            and loaders._mode == "sequential"
        )
        return loaders.iterables if one_after_another else loaders

    def _read_training(self) -> None:
        name = type(self.module).__name__
        loader = self._loaders_of("train")
        if loader is None:
            raise ConfigError(f"data: {name} has no train_dataloader.")
        read = self._read["train"] = read_loader(
            loader, owner=f"{name}.train_dataloader", seed=self.seed, training=True,
            limited=self.train_limit is not None,
        )  # fmt: skip
        typed = self._typed["global_batch_size"]
        self.drawn_together = (
            read.draw.name if read.draw is not None and read.draw.whole_batches else None
        )
        if typed is None:
            self.batch_note = f" (batch_size={read.batch_size} of {name} is the global batch)"
        elif self.drawn_together is not None and typed != read.batch_size:
            raise ConfigError(
                f"data.global_batch_size={typed}, but the batch sampler of {name} yields batches "
                f"of {read.batch_size}. "
                f"Type data.global_batch_size={read.batch_size}, or leave it out."
            )
        self.global_batch_size = typed or read.batch_size

    @override
    def dataset(self, split: Split) -> Dataset[Any] | Stream | None:
        return self._read[split].dataset

    @property
    @override
    def _train_samples(self) -> int:
        read: ReadLoader = self._read["train"]
        if not len(read.dataset):
            name = type(self.module).__name__
            raise ConfigError(
                f"data: {name} has no training samples: the dataset of train_dataloader is empty."
            )
        return self._limited(len(read.dataset) if read.draw is None else read.draw.size)

    @override
    def train_dataloader(self) -> Any:
        if self._asked_by_loop():  # all ranks are; a hook may ask on one rank alone
            self.check_ranks_agree("train")
        return super().train_dataloader()

    @override
    def _train_sampler(self, *, for_loop: bool = False, **arguments: Any) -> TrainSampler:
        read: ReadLoader = self._read["train"]
        if read.draw is None:
            made = TrainSampler(
                self.train_size, shuffled=read.shuffled, **self._order_arguments() | arguments
            )
        else:
            draw = read.draw.keep if for_loop else read.draw
            made = DrawnSampler(
                self.train_size, draw=lambda epoch: draw(self._drawn_epoch(epoch)),
                **self._order_arguments() | {"population": len(read.dataset)} | arguments,
            )  # fmt: skip
        made.users = read.loader.batch_sampler
        return made

    def _drawn_epoch(self, epoch: int) -> int:
        """Return the epoch whose draw an epoch has: limited ones all have the first."""
        return epoch if self.train_limit is None else 0

    @override
    def predict_dataloader(self) -> Any:
        split = "predict" if is_overridden("predict_dataloader", self.module) else "test"
        if split == "test" and "test" not in self._stages:
            self._set_up("test")
        read = self._read_loaders(split, predicting=True)
        return _for_each(
            lambda each, name: UnchangedLoader(self._replace(each, name, pads=False)),
            read,
            "predictions",
        )

    @override
    def _evaluation_loader(self, split: Split) -> Any:
        read = self._read_loaders(split)
        _for_each(self._check_classes, read, split)
        return _for_each(self._replace, read, split)

    def _read_loaders(self, split: Split, *, predicting: bool = False) -> Any:
        key = "predictions" if predicting else split
        if key not in self._read:
            loaders = self._loaders_of(split)
            owner = f"{type(self.module).__name__}.{split}_dataloader"

            def read(loader: Any, _: str) -> ReadLoader:
                return read_loader(loader, owner=owner, seed=self.seed, predicting=predicting)

            self._read[key] = [] if loaders is None else _for_each(read, loaders, split)
        return self._read[key]

    def _replace(self, read: ReadLoader, name: str, *, pads: bool = True) -> Any:
        if not len(read.dataset):
            self._say_empty(name, type(self.module).__name__)
        # at least 2 if possible: with 1 a rank may be left without a sample at the end
        size = self.eval_batch_size or max(
            min(2, read.batch_size), read.batch_size // self._rank_and_ranks()[1]
        )
        sampler = self._evaluation_sampler(read.dataset, size, pads=pads)
        loader = self._loader(name, read.dataset, sampler, read=read)
        check_padding(loader, name=name, owner=type(self.module).__name__, trainer=self.trainer)
        return loader

    @override
    def _loader(
        self,
        name: str,
        dataset: Any,
        sampler: Any,
        *,
        training: bool = False,
        read: ReadLoader | None = None,
        **options: Any,
    ) -> Any:
        read = self._read["train"] if read is None else read
        assert read is not None
        options = {**read.options, **options}
        if self._typed["num_workers"] is not None:
            options["num_workers"] = self._typed["num_workers"]
        if training:
            options["users_sampler"] = read.users_sampler
            self.num_workers = options["num_workers"]  # for the advice to a run that waits for data
        if not options["num_workers"]:
            options = {name: value for name, value in options.items() if name not in OF_WORKERS}
        return super()._loader(
            name,
            dataset,
            sampler,
            training=training,
            collate_fn=read.collate_fn,
            foreign=True,
            **options,
        )

    def check_ranks_agree(self, split: Split) -> None:
        """Raise ConfigError, on all ranks, if their data are not the same: they divide one order of
        samples.

        All ranks must have asked for the loaders of this split, and call this together.
        """
        if self._rank_and_ranks()[1] == 1 or split in self._ranks_agree:
            return
        reads: list[tuple[str, ReadLoader]] = []
        _for_each(lambda read, name: reads.append((name, read)), self._read[split], split)
        ranks_agree.check(
            reads,
            strategy=self.trainer.strategy,
            rank=self._rank_and_ranks()[0],
            owner=type(self.module).__name__,
            split=split,
            size=self.train_size
            if split == "train"
            else sum(len(read.dataset) for _, read in reads),
            seed=self.seed,
            num_workers=self._typed["num_workers"],
            fresh=self._resumed == (0, 0),
        )
        self._ranks_agree.add(split)


def _for_each(function: Callable[[Any, str], Any], loaders: Any, name: str) -> Any:
    """Return what a function makes of a loader and its name, for one loader or for each in a dict
    or list.
    """
    if isinstance(loaders, Mapping):
        return {key: function(each, f"{name}/{key}") for key, each in loaders.items()}
    if isinstance(loaders, Sequence):
        return [function(each, f"{name}/{i}") for i, each in enumerate(loaders)]
    return function(loaders, name)
