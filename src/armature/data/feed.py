"""Which samples a rank gets next: the position in the training data, and loaders that follow it.

`batching.py` divides a global batch into micro-batches and ranks, `sampler.py` turns a position
into samples. A `Feed` keeps the position, and gives each DataLoader that Lightning passes to
`Strategy.process_dataloader` our batch sampler: those of our data modules and of anybody's.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as L
from hydra.utils import get_object
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from armature.data import draw, folds, labels, same_data
from armature.data.base import DataModule
from armature.data.batching import FOLD_KEYS, LOADER_KEYS, Batches, plan_batches
from armature.data.draw import ReadLoader
from armature.data.loader import FedLoader, Unchanged, fed
from armature.data.sampler import EpochSampler, EvalSampler, TrainSampler
from armature.data.samples import Samples, has_targets, preserved_generators, seeded
from armature.data.stream import Stream
from armature.errors import ConfigError
from armature.training.progress import completed_batches
from armature.validation.composing import instantiate

log = logging.getLogger(__name__)

# What a data module sees of the Trainer while it is set up, which is before the Trainer is made
BEFORE_TRAINER = SimpleNamespace(
    world_size=1, num_nodes=1, num_devices=1, global_rank=0, local_rank=0, node_rank=0,
    is_global_zero=True, current_epoch=0,
)  # fmt: skip


class Feed(L.Callback):
    """Feeds a run from a LightningDataModule.

    Each hook of the data module that makes data is called once per stage, with seeded generators,
    so a `random_split` is the same on every rank and after a resume. Whoever calls it again,
    Lightning too, gets the first answer.

    Args:
        data: the data module, which need not know of this project.
        global_batch_size: samples per optimizer step, over all ranks; None: the batch size of the
            training loader.
        micro_batch_size: samples that one data rank puts through the model at once; "auto": its
            whole share of a step.
        eval_batch_size: samples per rank and batch in validation and test; None: the batch size of
            each loader, divided over the ranks.
        num_workers: loader processes per rank; None: as the loaders have. 0 is fastest if a sample
            is a slice of memory.
        seed: seed of the sample order and of augmentation.
        train_limit: train on this many samples only, "batch": on one global batch; None: on all.
        fold, folds: hold out this one of so many parts of the training samples for validation.
        skip_steps: numbers of steps, as the run counts them if earlier ones of the list are left
            out: the samples of each are left out, and what comes after them moves up.

    Attributes:
        assets: what is kept beside the run for other data, such as the names of classes.
        limits: batches of each split, or a share of its samples; None: all.
        measured: samples of all loaders for validation, test or predictions.
    """

    def __init__(
        self,
        data: L.LightningDataModule,
        *,
        global_batch_size: int | None = None,
        micro_batch_size: int | str = "auto",
        eval_batch_size: int | None = None,
        num_workers: int | None = None,
        seed: int = 0,
        train_limit: int | str | None = None,
        skip_steps: Sequence[int] = (),
        fold: int | None = None,
        folds: int | None = None,
    ) -> None:
        self.data, self._name = data, type(data).__name__
        self._ours = isinstance(data, DataModule)
        self.assets: Any = data if self._ours else labels.DatasetClasses(data)
        self._typed_batch, self._typed_workers = global_batch_size, num_workers
        self.global_batch_size, self.micro_batch_size = global_batch_size or 0, micro_batch_size
        self.eval_batch_size, self.seed, self.train_limit = eval_batch_size, seed, train_limit
        self.limits: dict[str, Any] = {}
        self.measured = 0
        self.skip_steps = sorted({*skip_steps})
        self._fold = None if fold is None or folds is None else (fold, folds)
        # parts (start, length) of the order of samples, by step: those of steps that are made
        self._skipped: dict[int, tuple[int, int]] = {}
        # training samples, before hooks could change the dataset
        self._first_size: int | None = None
        self._resumed = (0, 0)  # (samples, global batches) seen when this run began
        self._read: ReadLoader | None = None  # the training loader
        # by split and id of a loader: it, and what has taken its place. A fold is of train's
        self._fed: dict[tuple[str, int], tuple[Any, FedLoader]] = {}
        for name in ("prepare_data", "setup", *(f"{split}_dataloader" for split in draw.SPLITS)):
            if is_overridden(name, data):
                vars(data)[name] = self._once(name, getattr(data, name))
        self._train_loader = vars(data).get("train_dataloader")
        if self._fold is not None:
            vars(data)["val_dataloader"] = self._train_loader
        vars(data)["train_dataloader"] = self.whole_epoch

    @property
    def trainer(self) -> Any:
        trainer = self.data.trainer
        return trainer if isinstance(trainer, L.Trainer) else None

    # ------------------------------------------------------------ hooks of the data module
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
                        answer = hook(*args, **kwargs)
                    except AttributeError:
                        if name != "val_dataloader":
                            raise
                        # Lightning's documentation makes validation data for "fit" alone
                        self.data.setup(stage="fit")
                        answer = hook(*args, **kwargs)
                answers[stage] = Unchanged.each(answer) if name == "predict_dataloader" else answer
            return answers[stage]

        return ask

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        if self.data.trainer is None:
            self.data.trainer = BEFORE_TRAINER  # pyright: ignore[reportAttributeAccessIssue]
        try:
            with seeded(f"{self.seed}/setup"):
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
            if self.data.trainer is BEFORE_TRAINER:
                self.data.trainer = None

    def set_up(self) -> None:
        """Set up the training data, and read their loader."""
        self.data.setup(stage="fit")
        _ = self._train

    @property
    def _train(self) -> ReadLoader:
        if self._read is None:
            if self._train_loader is None:
                raise ConfigError(f"data: {self._name} has no train_dataloader.")
            self._read = self._read_loader(self._train_loader(), "train")
            drawn, typed = self.drawn_together, self._typed_batch
            if drawn is not None and typed not in (None, self._read.batch_size):
                raise ConfigError(
                    f"data.global_batch_size={typed}, but the batch sampler of {self._name} yields "
                    f"batches of {self._read.batch_size}. Type "
                    f"data.global_batch_size={self._read.batch_size}, or leave it out."
                )
            self.global_batch_size = typed or self._read.batch_size
        return self._read

    def _read_loader(self, loader: Any, split: str) -> ReadLoader:
        fold, training = self._fold if split in ("train", "val") else None, split == "train"
        read = draw.read_loader(
            loader,
            split if fold is None else "train",
            owner=f"{self._name}.{split}_dataloader",
            seed=self.seed,
            limited=training and self.train_limit is not None,
        )
        if fold is not None:
            read.dataset = folds.part(self.data, read, split, fold)
        if self._ours:
            read.shuffled = not isinstance(read.dataset, Stream)
        read.shuffled = read.shuffled and training
        return read

    @property
    def batch_note(self) -> str:
        """What the line at the start of a run adds about the batch."""
        if self._typed_batch is not None:
            return ""
        return f" (batch_size={self._train.batch_size} of {self._name} is the global batch)"

    @property
    def drawn_together(self) -> str | None:
        """The class of a batch sampler whose batches hold samples that belong together, or None."""
        drawn = self._train.draw
        return drawn.name if drawn is not None and drawn.whole_batches else None

    # ------------------------------------------------------------ the position
    @property
    def train_size(self) -> int:
        """Samples per epoch (N): with a limit, those of the first batches of each epoch's order.

        Raises:
            ConfigError: the number of samples has changed since it was first asked for.
        """
        if not (size := self._train_samples):
            raise ConfigError(
                f"data: {self._name} has no training samples: its dataset is empty, or all of it "
                "is held out."
            )
        self._first_size = self._first_size or size
        if size != self._first_size:
            raise ConfigError(
                f"data: there were {self._first_size} training samples when the run began, and "
                f"there are {size} now. Steps and positions count by their number, so it must "
                "stay. Let the dataset have one length from the start, and return a sample that it "
                "knows at each index: known[index % len(known)]."
            )
        return self._limited("train", size, self.global_batch_size)

    def _limited(self, split: str, size: int, batch_size: int) -> int:
        """Return how many of a split's samples its limit leaves, which counts such batches."""
        limit = self.limits.get(split)
        if isinstance(limit, float):
            limit = max(1, int(limit * -(-size // batch_size)))
        if limit is None:
            return size
        ranks = self.rank_and_ranks()[1]
        if batch_size == 1:  # each rank has one of the last samples, too
            limit += -limit % ranks
        return min(size, max(limit * batch_size, ranks))

    @property
    def _train_samples(self) -> int:
        """Samples that an epoch's order is made of."""
        read, limit = self._train, self.train_limit
        size = len(read.dataset) if read.draw is None else read.draw.size
        limit = self.global_batch_size if limit == "batch" else limit
        return size if limit is None else min(size, int(limit))

    @property
    def batches(self) -> Batches:
        """The batch arithmetic of this run. Raises ConfigError if the sizes do not divide."""
        _ = self._train  # which may say the batch size
        return plan_batches(self.global_batch_size, self.micro_batch_size, self.rank_and_ranks()[1])

    @property
    def samples_seen(self) -> int:
        """Position in the stream of training samples: the number of samples in all completed global
        batches.

        It is computed from the trainer's count of global batches, so batches fetched ahead do not
        change it. Set it only after the trainer knows its step.
        """
        samples, steps = self._resumed
        return samples + (self._steps() - steps) * self.global_batch_size

    @samples_seen.setter
    def samples_seen(self, value: int) -> None:
        self._skipped = {k: part for k, part in self._parts().items() if k <= self._steps()}
        self._resumed = (value, self._steps())

    def _steps(self) -> int:
        return self._resumed[1] if self.trainer is None else completed_batches(self.trainer)

    def _epoch(self) -> int:
        """Return the epoch that the position is in, or the one before if Lightning has not closed
        that yet.

        Lightning asks for the length of an epoch after its last step: before closing it, and after
        a resume there.
        """
        epoch, place = divmod(self.samples_seen, self.train_size)
        first_step = place < self.global_batch_size <= self.train_size
        closing = (
            first_step and self.trainer is not None and self.trainer.current_epoch == epoch - 1
        )
        return epoch - 1 if closing else epoch

    def _parts(self) -> dict[int, tuple[int, int]]:
        """Return the parts (start, length) of the order of samples that are left out, by step."""
        (seen, made), parts = self._resumed, dict(self._skipped)
        for step in (step for step in self.skip_steps if step > made):
            left_out = sum(length for _, length in parts.values())
            start = seen + (step - 1 - made) * self.global_batch_size + left_out
            parts[step] = (start, self.global_batch_size)
        return parts

    @override
    def state_dict(self) -> dict[str, Any]:
        drawn, steps = self._train.draw, self._steps()
        return {
            "samples_seen": self.samples_seen,
            "step": steps,
            "train_size": self.train_size,
            "seed": self.seed,
            "skipped": [[step, *part] for step, part in self._parts().items() if step <= steps],
            "names": self.assets.known,
            "drawn": {} if drawn is None else drawn.state_dict(since=self._drawn(self._epoch())),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        step, read = state_dict["step"], self._train
        labels.check_same(state_dict["names"], self.assets.known)
        # a checkpoint is loaded once more after users' hooks of the start
        again = self._resumed != (0, 0)
        self._resumed = (state_dict["samples_seen"], step)
        self._skipped = {step: (start, size) for step, start, size in state_dict["skipped"]}
        if late := [s for s in self.skip_steps if s <= step and s not in self._skipped]:
            raise ConfigError(
                f"data.skip_steps={late}: the checkpoint is of step {step}, so these steps are "
                "made. Type resume= with an earlier checkpoint, or leave them out of "
                "data.skip_steps."
            )
        if read.draw is not None and state_dict["seed"] == self.seed:
            read.draw.load_state_dict(state_dict["drawn"], population=len(read.dataset))
        if again:
            return
        if state_dict["train_size"] != self.train_size:
            log.warning(
                "The checkpoint saw %d of %d training samples per epoch. There are %d now, so the "
                "run continues in another sample order than without the change. A share drawn for "
                "validation or test may now hold samples that the model was trained on.",
                state_dict["samples_seen"], state_dict["train_size"], self.train_size,
            )  # fmt: skip
        if state_dict["seed"] != self.seed:
            log.warning(
                "The checkpoint's samples were in the order of data.seed=%s, and continue in that "
                "of data.seed=%s: until the epoch ends, some samples come twice and some not at "
                "all.",
                state_dict["seed"], self.seed,
            )  # fmt: skip

    # ------------------------------------------------------------ who gets which samples
    def rank_and_ranks(self) -> tuple[int, int]:
        """Return rank and size on the data axis, from the strategy; (0, 1) without a trainer or a
        second process. Ranks of a tensor or pipeline axis get the same samples.
        """
        strategy = getattr(self.trainer, "strategy", None)
        kwargs = getattr(strategy, "distributed_sampler_kwargs", None) or {}
        return kwargs.get("rank", 0), kwargs.get("num_replicas", 1)

    def train_sampler(
        self, *, in_loop: bool = False, position: Callable[[], int] | None = None
    ) -> TrainSampler:
        """Return this rank's sampler of the training data.

        Args:
            in_loop: a sampler of the user's draws an epoch for the run, not for someone who looks.
            position: returns where to begin; None: the run's own.
        """
        read, size, population = self._train, self.train_size, self._train_samples
        draw: Callable[[int], Any] | None = None
        if self._ours and is_overridden("order", self.data, DataModule):
            data, limited = cast(DataModule, self.data), self.train_limit is not None
            draw = partial(data.order, size=size, seed=self.seed, limited=limited)
        elif (drawn := read.draw) is not None:
            draw = lambda epoch: drawn(self._drawn(epoch), keep=in_loop)  # noqa: E731
        return TrainSampler(
            size,
            seed=self.seed,
            batches=self.batches,
            rank=self.rank_and_ranks()[0],
            epoch=self._epoch,
            position=position or (lambda: self.samples_seen),
            left_out=lambda: self._parts().values(),
            shuffled=read.shuffled,
            draw=draw,
            population=population if draw is None else len(read.dataset),
        )

    def _drawn(self, epoch: int) -> int:
        """Return the epoch whose draw an epoch has: limited ones all have the first."""
        return epoch if self.train_limit is None else 0

    def indices_of_step(self, position: int) -> list[list[int]]:
        """Return the indices of the samples that this rank takes in the step at a position, per
        micro-batch.
        """
        sampler = self.train_sampler()
        return [[key % sampler.population for key in keys] for keys in sampler.step_keys(position)]

    # ------------------------------------------------------------ loaders
    def replace(self, loader: Any) -> Any:
        """Return the loader that takes the place of one of the data module's, in the Trainer's
        stage: the same at each call, so that its workers stay alive.

        Raises:
            ConfigError: no DataLoader, or one that cannot be fed.
        """
        split = self.trainer.state.stage.dataloader_prefix
        training = split == "train"
        if isinstance(loader, FedLoader):  # Lightning keeps it in a CombinedLoader of the user's
            if not training or not isinstance(loader.fed_by, EpochSampler):
                return loader
            loader = self._train.loader
        elif training:
            raise ConfigError(
                f"data: the training loader is a {type(loader).__name__} that "
                f"{self._name}.train_dataloader has not returned. Return one DataLoader there."
            )
        elif loader == []:  # Lightning measures nothing there
            return loader
        if (key := (split, id(loader))) not in self._fed:
            made = self.train_loader() if training else self._evaluated(loader, split)
            self._fed[key] = loader, made
        return self._fed[key][1]

    def loaders(self, split: str) -> list[FedLoader]:
        """Return what replaces the loaders of a split, without a Trainer."""
        if split == "train":
            return [self.train_loader()]
        if not is_overridden(f"{split}_dataloader", self.data):
            return []
        found = getattr(self.data, f"{split}_dataloader")()
        if not isinstance(found, CombinedLoader):
            found = CombinedLoader(found)
        return [self._evaluated(each, split) for each in found.flattened if each != []]

    def train_loader(self) -> FedLoader:
        """Return the loader of the training loop: this rank's batches from the position on."""
        if not self._ours:
            self._compare_ranks(self._train, "train")
        sampler = self.train_sampler(in_loop=True)
        return self._loader(self._train, sampler, persistent=self._ours or None, in_loop=True)

    def share(self) -> FedLoader:
        """Return what hooks get as `trainer.train_dataloader`: this rank's batches of the whole
        epoch, from a loader of their own, which takes nothing from the training loop.
        """
        return self._loader(
            self._train,
            self.train_sampler(position=self.train_sampler().first_position),
            persistent=False,
        )

    def whole_epoch(self) -> FedLoader:
        """Return what the data module's `train_dataloader` returns: all samples of the epoch, on
        every rank, in global batches, so that its length is that of the epoch in steps.
        """
        return self._loader(self._train, EpochSampler(self.train_sampler()), persistent=False)

    def _evaluated(self, loader: Any, split: str) -> FedLoader:
        loader = loader.loader if isinstance(loader, Unchanged) else loader
        read, (rank, ranks) = self._read_loader(loader, split), self.rank_and_ranks()
        predicting = split == "predict"
        if not predicting and not self._ours:
            self._compare_ranks(read, split)
            self.assets.check(read.dataset, split)
        if not len(read.dataset) and rank == 0:
            log.warning(
                "data: %s has no samples for %s: nothing is measured there.", self._name, split
            )
        whole = self.eval_batch_size or read.batch_size
        # at least 2 if possible: with 1 a rank may be left without a sample at the end
        size = self.eval_batch_size or max(min(2, whole), whole // ranks)
        # a limit leaves the same samples on any number of ranks, if each has one of them
        sampler = EvalSampler(
            self._limited(split, len(read.dataset), whole),
            batch_size=size,
            rank=rank,
            ranks=ranks,
            pads=not predicting,
        )
        self.measured += sampler.size
        made = self._loader(read, sampler, predicting=predicting)
        self._check_padding(made, split)
        return made

    def _loader(
        self, read: ReadLoader, sampler: Any, *, persistent: bool | None = None,
        predicting: bool = False, in_loop: bool = False,
    ) -> FedLoader:  # fmt: skip
        samples = Samples(
            read.dataset,
            size=sampler.population,
            seed=self.seed,
            training=not isinstance(sampler, EvalSampler),
            collate_fn=read.loader.collate_fn,
            foreign=not self._ours,
        )
        workers, trainer = self._typed_workers, self.trainer
        return fed(
            read.loader,
            samples,
            sampler,
            num_workers=read.loader.num_workers if workers is None else workers,
            persistent=read.loader.persistent_workers if persistent is None else persistent,
            pin=trainer is not None and trainer.strategy.root_device.type == "cuda",
            predicting=predicting,
            in_loop=in_loop,
        )

    def predicts(self) -> None:
        """Let predictions read the test data if the data module has none to predict."""
        if not is_overridden("predict_dataloader", self.data):
            test: Any = self.data.test_dataloader

            def predict_dataloader() -> Any:
                self.data.setup(stage="test")
                return Unchanged.each(test() if is_overridden("test_dataloader", self.data) else [])

            vars(self.data)["predict_dataloader"] = predict_dataloader

    # ------------------------------------------------------------ checks
    def _compare_ranks(self, read: ReadLoader, split: str) -> None:
        if self.rank_and_ranks()[1] > 1:
            same_data.check(
                read,
                self.trainer.strategy,
                owner=self._name,
                split=split,
                seed=self.seed,
            )

    def _check_padding(self, loader: FedLoader, split: str) -> None:
        """Raise ConfigError if a rank would have no sample in a batch of an evaluation, and none
        can stand in for it.
        """
        sampler = loader.fed_by
        if not sampler.has_padding:
            return
        # any other task would count targets of -100
        if hasattr(self.trainer.lightning_module, "mean_over_targets"):
            with preserved_generators():
                if has_targets(loader.reader.dataset.__getitems__([0])):  # pyright: ignore[reportAttributeAccessIssue]
                    return
        size, ranks = sampler.size, sampler.ranks
        remedy = (
            f"Leave {size % ranks} of them out (torch.utils.data.Subset(dataset, "
            f"range({size // ranks * ranks}))), or type data.eval_batch_size=2 if the samples can "
            "be stacked or a collate_fn pads them."
            if size > ranks
            else f"Give it at least {ranks} samples, or evaluate on at most {size} ranks."
        )
        raise ConfigError(
            f"data: {self._name} has {size} samples for {split}, but {ranks} ranks with batches of "
            f"{sampler.batch_size} need one for each rank in every batch. Samples that do not "
            'count can fill up only a batch with "targets", of a task that declares '
            f"mean_over_targets (docs/your-own.md). {remedy}"
        )


def build(cfg: DictConfig) -> Feed:
    """Return the feed of a configuration."""
    target: Any = get_object(cfg.data._target_)
    parameters = inspect.signature(target).parameters
    settings: Any = OmegaConf.to_container(cfg.data, resolve=True)
    # a module of users may mean something else by them, but not by the batch
    shared = (
        LOADER_KEYS
        if isinstance(target, type) and issubclass(target, DataModule)
        else ("global_batch_size",)
    )
    own = {
        key: settings[key]
        for key in (*LOADER_KEYS, *FOLD_KEYS)
        if key in settings and (key not in parameters or key in shared)
    }
    given = {key: value for key, value in settings.items() if key in parameters or key not in own}
    with seeded(f"{cfg.seed}/setup"):  # a constructor may split the samples, too
        # our own classes take plain lists and dicts
        data = instantiate(
            given, _convert_="all" if target.__module__.startswith("armature.") else "none"
        )
    if not isinstance(data, L.LightningDataModule):
        raise ConfigError(
            f"data._target_={cfg.data._target_} makes a {type(data).__name__}. Name a "
            "LightningDataModule, or a class that derives from armature.data.base.DataModule "
            "(docs/data.md)."
        )
    if "prepare_data_per_node" not in vars(data):  # which the constructor of Lightning's class sets
        raise ConfigError(
            f"data: {type(data).__name__}.__init__ must call super().__init__() first. Add that "
            "line."
        )
    return Feed(data, **{"seed": cfg.seed, **own})
