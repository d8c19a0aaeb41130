"""Hugging Face datasets: from the hub, or local files in any of its formats; map-style, or
streamed.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch.utils.data import Dataset, IterableDataset
from typing_extensions import override

from armature.data import extras
from armature.data.base import Split
from armature.data.labels import LabeledData, ordered
from armature.errors import ConfigError, error_line

log = logging.getLogger(__name__)

PIXELS = ("L", "RGB", "RGBA")  # Pillow's modes whose numbers are brightness in 8 bits
Of = dict[str, str | list[str]]  # columns by name in a sample


class HFData(LabeledData):
    """Samples {"inputs", "targets"} of two columns.

    Texts as targets are classes, numbered in the order of `labels.ordered`.

    Predictions are of the test split, or another one if there is none, and need no column of
    targets.

    Args:
        path: a name on the hub; or csv, json, parquet, text, imagefolder … with data_files or
            data_dir.
        name: the configuration of the data set, if it has several.
        data_files, data_dir: of local files.
        splits: their names there, for train, val and test; null: there is none.
        inputs: a column, or a list of columns of numbers, which become one vector (F,).
        targets: a column.
        streaming: read the samples one after the other, without downloading all of them first.
        classes: whether texts as targets are names of classes; else they stay texts.
        image_mode: turn images into this mode of Pillow's: L, RGB or RGBA. None: they have it
            already.
        loader: batch sizes and the other arguments of DataModule.
    """

    predict_split = "predict"

    def __init__(
        self,
        *,
        path: str,
        name: str | None = None,
        data_files: Any = None,
        data_dir: str | None = None,
        splits: dict[str, str | None] | None = None,
        inputs: str | Sequence[str] = "inputs",
        targets: str = "targets",
        streaming: bool = False,
        classes: bool = True,
        image_mode: str | None = None,
        **loader: Any,
    ) -> None:
        super().__init__(**loader)
        self.path, self.texts_are_classes, self.image_mode = path, classes, image_mode
        files = (
            data_files if data_files is None or isinstance(data_files, str) else _plain(data_files)
        )
        self.source = {
            "path": path,
            "name": name,
            "data_files": files,
            "data_dir": data_dir,
            "streaming": streaming,
        }
        if path == "csv":  # pandas takes the texts NA, None and null for empty cells
            self.source |= {"keep_default_na": False, "na_values": [""]}
        self.splits = dict(splits or {"train": "train", "val": "validation", "test": "test"})
        self.inputs, self.targets = (
            inputs if isinstance(inputs, str) else [str(each) for each in inputs],
            targets,
        )
        if not self.inputs:
            raise ConfigError(
                f"data.inputs={inputs}: name a column, or several columns of numbers."
            )
        # rows by split, since a name on the hub is looked up at each load
        self._loaded: dict[str, Any] = {}

    @override
    def dataset(self, split: Split) -> Any:
        of = (
            next((s for s in ("test", "val", "train") if self.splits.get(s)), "test")
            if split == "predict"
            else split
        )
        if self.splits.get(of) is None:
            return None
        rows, columns = self._load(of), Of(inputs=self.inputs, targets=self.targets)
        known = rows.column_names
        if split == "predict" and known is not None and self.targets not in known:
            del columns["targets"]
        self._check(rows, _flat(columns))
        rows = self._with_pixels(rows)
        names = self._class_names(rows) if "targets" in columns else None
        if names is not None and split != "predict" and self._has_unlabeled(rows, split):
            return None
        numbers = None
        if names is not None and split == "predict" and not self.knows(names):
            del columns["targets"]  # they are not needed, and have no numbers
        elif names is not None:
            where = f"data.path={self.path}, split {self.splits[of]}, column {self.targets},"
            keys = names if _is_text(rows, self.targets) else range(len(names))
            # -1: not labeled
            numbers = dict(zip(keys, self.numbers(names, where=where), strict=True)) | {-1: -1}
        rows = rows.with_format("torch")
        if self.source["streaming"]:
            return StreamedColumns(rows, columns, numbers)
        return Columns(rows, columns, numbers, where=f"{self._where}, split {self.splits[of]}")

    @override
    def names(self) -> dict[str, list[str]]:
        classes = self._class_names(self._load("train")) if self.splits.get("train") else None
        return {} if classes is None else {"classes": classes}

    def _class_names(self, rows: Any) -> list[str] | None:
        """Return the names of the classes in the column of targets, or None if it holds numbers."""
        column = self.targets
        feature: Any = (rows.features or {}).get(column)
        if hasattr(feature, "names"):
            return list(feature.names)
        if not self.texts_are_classes or not _is_text(rows, column):
            return None
        if self.source["streaming"]:
            raise ConfigError(
                f"data.targets={column} holds texts, which a stream cannot number. Type "
                "data.streaming=false, or "
                "data.classes=false if they are no names of classes."
            )
        self._check(rows, [column])
        return ordered(rows.unique(column))

    def _has_unlabeled(self, rows: Any, split: Split) -> bool:
        """Return whether a class of the test split is -1, as public tests have it.

        Raises ConfigError for others.
        """
        if (
            self.source["streaming"]
            or _is_text(rows, self.targets)
            or -1 not in rows.unique(self.targets)
        ):
            return False
        where = (
            f"data.path={self.path}, split {self.splits[split]}: column {self.targets} holds "
            "-1, which is no class"
        )
        if split != "test":
            raise ConfigError(
                f"{where}. Leave out these rows, or name another split: data.splits.{split}=…"
            )
        log.info("%s: the run does not test (data.splits.test=null).", where)
        return True

    def _with_pixels(self, rows: Any) -> Any:
        """Return the rows with images of `image_mode`.

        Raises ConfigError if numbers of the first are no brightness.
        """
        datasets = extras.load("datasets", needed_by="data=hf")
        for column in _flat(Of(inputs=self.inputs)):
            if not isinstance((rows.features or {}).get(column), datasets.Image):
                continue
            first = next(iter(rows.select_columns([column])), {column: None})[column]
            mode = getattr(first, "mode", "RGB")
            where = (
                f"data.path={self.path}: the first image of column {column} has Pillow's mode "
                f"{mode}"
            )
            if mode.startswith(("I", "F")):
                raise ConfigError(
                    f"{where}, whose pixels have more than 8 bits. Convert the images to 8 bits."
                )
            if self.image_mode is not None:
                rows = rows.cast_column(column, datasets.Image(mode=self.image_mode))
            elif mode not in PIXELS:
                raise ConfigError(
                    f"{where}, whose numbers are not brightness. Type data.image_mode=RGB (or L: "
                    "grey)."
                )
        return rows

    def _check(self, rows: Any, columns: list[str]) -> None:
        known = rows.column_names
        if known is not None and (missing := [column for column in columns if column not in known]):
            raise ConfigError(
                f"{self._where} has no column {', '.join(missing)}. Its columns: "
                f"{', '.join(known)}. "
                "Type data.inputs=… data.targets=…"
            )
        for column in () if self.source["streaming"] else columns:
            if empty := rows.data.column(column).null_count:
                raise ConfigError(
                    f"{self._where}: column {column} has {empty} empty cells. Fill them in, or "
                    "leave out these rows."
                )

    def _load(self, split: str) -> Any:
        if split in self._loaded:
            return self._loaded[split]
        name = self.splits[split]
        datasets = extras.load("datasets", needed_by="data=hf")
        if not (self.source["data_files"] or self.source["data_dir"]) and _is_format(
            datasets, self.path
        ):
            raise ConfigError(  # it would read each file below the current folder
                f"data.path={self.path}: a format, but no files. Type data.data_files=… or "
                "data.data_dir=…, too."
            )
        unreachable = self._unreachable
        try:
            with _offline(datasets) if unreachable else nullcontext():
                rows = self._loaded[split] = datasets.load_dataset(split=name, **self.source)
            return rows
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            if unreachable and isinstance(error, ConnectionError):
                raise ConfigError(
                    f"data.path={self.path}: {unreachable}, and no data set of this name is in the "
                    "cache of datasets. "
                    "Name local files (data.path=csv data.data_files=my.csv), or try again with a "
                    "network."
                ) from error
            cause = (
                error.__cause__ if isinstance(error, datasets.exceptions.DatasetsError) else error
            )
            remedy = (
                f"data.splits.{split}=… (null: there is none; 'train[:10%]': a part of another one)"
            )
            if "split" not in str(error).lower():
                remedy = "data.path=…, data.name=… or data.data_files=… of data that are there"
            said = error_line(cause or error).rstrip(".!")
            raise ConfigError(f"{self._where}, split {name}: {said}. Type {remedy}.") from error

    @property
    def _where(self) -> str:
        """The data, for messages: a format alone, such as csv, says nothing."""
        files = self.source["data_files"] or self.source["data_dir"]
        return f"data.path={self.path}" + (f" ({files})" if files else "")

    @cached_property
    def _unreachable(self) -> str | None:
        """Why a name cannot be looked up on the hub, or None.

        The hub's own retries take half a minute to say so.
        """
        datasets = extras.load("datasets", needed_by="data=hf")
        if (
            os.path.isdir(self.path)
            or _is_format(datasets, self.path)
            or datasets.config.HF_HUB_OFFLINE
        ):
            return None
        if getproxies():  # one that resolves names itself
            return None
        host = urlsplit(datasets.config.HF_ENDPOINT).hostname
        for seconds in (1, 1, None):
            try:
                socket.getaddrinfo(host, None)
                return None
            except OSError as error:
                if seconds is None:
                    return f"{host} cannot be reached from this machine ({error_line(error)})"
                time.sleep(seconds)
        return None


def _is_format(datasets: Any, path: str) -> bool:
    """Return whether a data set's name is that of a format, such as csv."""
    formats = Path(datasets.packaged_modules.__file__).parent
    return any(entry.name == path and entry.is_dir() for entry in formats.iterdir())


@contextmanager
def _offline(datasets: Any) -> Iterator[None]:
    """Let datasets take what its cache has, without asking the hub."""
    before, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


class Columns(Dataset[dict[str, Any]]):
    """Two columns of a map-style data set."""

    def __init__(
        self, rows: Any, columns: Of, numbers: dict[Any, int] | None = None, *, where: str = ""
    ) -> None:
        self.rows, self.columns, self.numbers, self.where = rows, columns, numbers, where

    def __len__(self) -> int:
        return len(self.rows)

    @override
    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            row = self.rows[index]
        except OSError as error:  # a damaged image
            raise ConfigError(
                f"{self.where}: sample {index} cannot be read ({error}). Remove it."
            ) from error
        return _sample(row, self.columns, self.numbers)


class StreamedColumns(IterableDataset[dict[str, Any]]):
    """Two columns of a streamed data set, read as data/iterable.py says."""

    def __init__(self, rows: Any, columns: Of, numbers: dict[Any, int] | None = None) -> None:
        self.rows, self.columns, self.numbers = rows, columns, numbers

    def set_epoch(self, epoch: int) -> None:
        self.rows.set_epoch(epoch)

    @override
    def __iter__(self) -> Any:
        return (_sample(row, self.columns, self.numbers) for row in self.rows)


def _sample(row: dict[str, Any], columns: Of, numbers: dict[Any, int] | None) -> dict[str, Any]:
    """Return a sample.

    `numbers`: of targets that are classes, by their text or their number in the data set.
    """
    sample = {
        name: row[of] if isinstance(of, str) else _vector(row, of) for name, of in columns.items()
    }
    if numbers is not None and "targets" in sample:
        target = sample["targets"]
        sample["targets"] = torch.tensor(
            numbers[target if isinstance(target, str) else int(target)]
        )
    images = isinstance(sample["inputs"], torch.Tensor) and sample["inputs"].dtype == torch.uint8
    return {**sample, "inputs": sample["inputs"].float() / 255} if images else sample


def _vector(row: dict[str, Any], columns: list[str]) -> torch.Tensor:
    values = [row[column] for column in columns]
    for column, value in zip(columns, values, strict=True):
        if not isinstance(value, torch.Tensor) or value.ndim:
            raise ConfigError(
                f"data.inputs={columns}: column {column} holds no single numbers. Leave it out, or "
                "type "
                f"data.inputs={column} for it alone."
            )
    return torch.stack([value.float() for value in values])


def _flat(columns: Of) -> list[str]:
    return [column for of in columns.values() for column in ([of] if isinstance(of, str) else of)]


def _is_text(rows: Any, column: str) -> bool:
    return getattr((rows.features or {}).get(column), "dtype", None) in ("string", "large_string")


def _plain(files: Any) -> Any:
    return {key: _plain(value) for key, value in files.items()} if hasattr(files, "items") else (
        files if isinstance(files, str) else list(files)
    )  # fmt: skip
