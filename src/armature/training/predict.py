"""Predictions of `predict_step`, one row per sample in the order of the data, from any number of
processes.

Each process holds the whole model, takes its share of every batch, and writes rows to a part file
as it goes; the parts are merged by the samples' places. No process waits for another.
"""

import csv
import heapq
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from typing_extensions import override

from armature import files
from armature.data import extras
from armature.data.feed import Feed
from armature.errors import ConfigError
from armature.loading import WithWeights
from armature.loggers import NoLogger
from armature.training.progress import feed_of

SUFFIXES = (".parquet", ".csv", ".jsonl")


def check_output(file: Path) -> None:
    """Raise ConfigError if predictions cannot be written to a file."""
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"out={file}: name a file that ends in {', '.join(SUFFIXES)}.")
    require_new(file)
    if not (folder := file.absolute().parent).is_dir():
        raise ConfigError(
            f"out={file}: there is no folder {folder}. Create it, or name another file."
        )
    if reason := files.why_not_writable(file):
        raise ConfigError(
            f"out={file}: {folder} cannot be written ({reason}). Name a file in another folder."
        )
    if file.suffix == ".parquet":
        extras.load("pyarrow", needed_by=f"out={file}")


def require_new(file: Path) -> None:
    """Raise ConfigError if a file of predictions exists."""
    if file.exists():
        raise ConfigError(f"out={file}: this file exists already. Name another, or remove it.")


def make_trainer(
    part: Path,
    *,
    run_dir: Path,
    rank: int,
    ranks: int,
    accelerator: str,
    precision: str,
    callbacks: Sequence[L.Callback] = (),
    read: Callable[[], dict[str, Any]] = dict,
) -> L.Trainer:
    """Return the Trainer of one rank, which writes its rows to a part file.

    Args:
        run_dir: of the run that the task is from, for what the task reads there.
        callbacks: the run's.
        read: gives the task its weights, as of `loading.task_and_weights`.
    """
    device = torch.device({"gpu": f"cuda:{rank}"}.get(accelerator, accelerator))
    shown = [each for each in callbacks if rank == 0 or not isinstance(each, ProgressBar)]
    return L.Trainer(
        accelerator=accelerator,
        devices=[rank] if accelerator == "gpu" else 1,
        strategy=OneOf(device, rank, ranks, read),
        logger=NoLogger(run_dir),
        default_root_dir=run_dir,
        precision=precision,  # pyright: ignore[reportArgumentType]
        enable_checkpointing=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        enable_progress_bar=rank == 0,
        callbacks=[*shown, RowWriter(part)],
    )


def predict(task: L.LightningModule, feed: Feed, trainer: L.Trainer) -> None:
    """Predict one rank's share."""
    if not is_overridden("predict_step", task) and not is_overridden("forward", task):
        raise ConfigError(
            f"{type(task).__name__} has neither predict_step nor forward. Give it a method "
            "predict_step(self, batch, batch_idx) that returns a tensor, or a dict of tensors, "
            "with a row per sample."
        )
    trainer.callbacks.append(feed)  # pyright: ignore[reportAttributeAccessIssue]
    feed.predicts()
    trainer.predict(task, datamodule=feed.data, return_predictions=False)


class OneOf(WithWeights):
    """One process that takes its share of the samples and knows of no other."""

    def __init__(
        self, device: torch.device, rank: int, ranks: int, read: Callable[[], dict[str, Any]]
    ) -> None:
        super().__init__(device, read)
        self.global_rank = self.local_rank = rank
        self.world_size = ranks

    @property
    @override
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """What a data module asks for: the rank and the number of ranks on the data axis."""
        return {"rank": self.global_rank, "num_replicas": self.world_size}


class RowWriter(L.Callback):
    """Write a line of JSON per sample: [place, row].

    The place orders the samples of all loaders and ranks.

    An integer in the column `class` becomes the name of the class, where the data have names.
    """

    def __init__(self, part: Path) -> None:
        self.part = part
        # by loader: samples of each batch; a method of the dataset that says what a sample is
        self._samples: dict[int, tuple[list[list[int]], Any]] = {}

    # without samples Lightning calls no other hook
    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._file = self.part.open("w")

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._file.close()

    @override
    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        loaders = CombinedLoader(trainer.predict_dataloaders, "sequential").flattened
        if dataloader_idx not in self._samples:
            loader = loaders[dataloader_idx]
            self._samples[dataloader_idx] = [*loader.fed_by], loader.reader.dataset.describe
        batches, describe = self._samples[dataloader_idx]
        indices, names = batches[batch_idx], feed_of(trainer).assets.class_names
        found = rows(outputs, len(indices), owner=type(pl_module).__name__)
        for index, row in zip(indices, found, strict=True):
            own = {"loader": dataloader_idx} if len(loaders) > 1 else {}
            own |= {"index": index} | (describe(index) if describe else {})
            number = row.get("class")
            if names and type(number) is int and 0 <= number < len(names):
                row["class"] = str(names[number])
            self._file.write(json.dumps([[dataloader_idx, index], own | row]) + "\n")


def rows(outputs: Any, count: int, *, owner: str) -> list[dict[str, Any]]:
    """Return plain values by column for each of `count` samples.

    A tensor (B, …) is the column `prediction`. Dicts and tuples of such tensors have a column for
    each, named by its path, as in `scores/car` or `0`. A list of B values of any size, or dicts,
    holds one for each sample.
    """
    if isinstance(outputs, list) and len(outputs) == count:
        plain = [_plain(each) for each in outputs]
        return [each if isinstance(each, dict) else {"prediction": each} for each in plain]
    columns = dict(_columns(outputs, ""))
    wrong = next((n for n, column in columns.items() if _length(column) != count), None)
    if wrong is not None or not columns:
        found: Any = outputs if wrong is None else columns[wrong]
        name = f"'{wrong}' " if wrong else ""
        shape = f"of shape {tuple(found.shape)}" if hasattr(found, "shape") else f"{found!r:.60}"
        raise ConfigError(
            f"{owner}.predict_step returned {name}{shape} for a batch of "
            f"{count} samples. Its first dimension must be the samples: return a row for each, "
            "several columns as a tuple."
        )
    values = {name: _plain(column) for name, column in columns.items()}
    return [{name: column[i] for name, column in values.items()} for i in range(count)]


def _columns(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    named = value._asdict() if hasattr(value, "_asdict") else value
    # texts of samples: torch's own collate makes a tuple of them
    if isinstance(named, tuple) and not all(isinstance(v, str | int | float) for v in named):
        named = {str(i): each for i, each in enumerate(named)}
    if isinstance(named, dict):
        for key, each in named.items():
            yield from _columns(each, f"{path}/{key}" if path else str(key))
    elif named is not None:
        yield path or "prediction", named


def _length(value: Any) -> int | None:
    is_array = isinstance(value, Tensor | np.ndarray)
    return len(value) if (value.ndim if is_array else isinstance(value, list | tuple)) else None


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.float() if value.dtype == torch.bfloat16 else value).tolist()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def merge(parts: list[Path], file: Path) -> int:
    """Write the rows of all parts to a file, in order; return their number.

    The rows are read several times: the columns are those of all rows. In CSV, lists and dicts
    become JSON within a cell, which is empty in a row without the column.
    """

    def read() -> Iterator[dict[str, Any]]:
        with ExitStack() as stack:
            placed = [map(json.loads, stack.enter_context(part.open())) for part in parts]
            for _, row in heapq.merge(*placed, key=lambda each: each[0]):
                yield row

    with files.replacing(file) as temporary:
        if file.suffix == ".parquet":
            _write_parquet(temporary, [*read()])  # in memory as a whole
        else:
            with temporary.open("w", encoding="utf-8", newline="") as stream:
                if file.suffix == ".jsonl":
                    stream.writelines(json.dumps(row) + "\n" for row in read())
                elif columns := dict.fromkeys(column for row in read() for column in row):
                    writer = csv.DictWriter(stream, [*columns], lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(
                        {
                            k: json.dumps(v) if isinstance(v, list | dict) else v
                            for k, v in row.items()
                        }
                        for row in read()
                    )
    return sum(1 for _ in read())


def _write_parquet(file: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    names = dict.fromkeys(column for row in rows for column in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    pyarrow.parquet.write_table(pyarrow.table(columns), str(file))
