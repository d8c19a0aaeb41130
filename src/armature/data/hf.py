"""Hugging Face datasets: from the hub, or local files in any of its formats; map-style, or
streamed.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch.utils.data import Dataset, IterableDataset
from typing_extensions import override

from armature.data import extras, pixels
from armature.data.base import Split
from armature.data.labels import LabeledData, ordered
from armature.errors import ConfigError, error_line

log = logging.getLogger(__name__)

_LOOKS = 32  # images, spread over the split, that decide how all are read
Of = dict[str, str | list[str]]  # columns by name in a sample


class HFData(LabeledData):
    """Samples {"inputs", "targets"} of two columns.

    Texts as targets are classes, numbered in the order of `labels.ordered`.

    Predictions are of the test split, or another one if there is none, and need no column of
    targets.

    Args:
        path: a name on the hub; csv, json, parquet, text, imagefolder … with data_files or
            data_dir; or a folder written by save_to_disk (of one data set: the split train).
        name: the configuration of the data set, if it has several.
        data_files, data_dir: of local files.
        splits: their names there, for train, val and test; null: there is none.
        inputs: a column, or a list of columns of numbers, which become one vector (F,).
        targets: a column.
        streaming: read the samples one after the other, without downloading all of them first.
        classes: whether texts as targets are names of classes; else they stay texts.
        image_mode: read images in this mode of Pillow's: L, RGB or RGBA. None: L if all show grey,
            RGBA if all have it, else RGB; an image that shows more is refused.
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
        self._mode: str | None = None  # that all images are read in
        if image_mode not in (None, *pixels.MODES):
            raise ConfigError(
                f"data.image_mode={image_mode}: type {', '.join(pixels.MODES)} or null."
            )

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
        where = f"{self._where}, split {self.splits[of]}"
        images = self._image_columns(rows, where)
        rows = undecoded(rows, images).with_format("torch")
        if self.source["streaming"]:
            return StreamedColumns(rows, columns, numbers, images=images)
        return Columns(rows, columns, numbers, where=where, images=images)

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

    def _image_columns(self, rows: Any, where: str) -> dict[str, ImageColumn]:
        """Return how the images of the inputs are read."""
        datasets = extras.load("datasets", needed_by="data=hf")
        features = rows.features or {}
        return {
            column: ImageColumn(datasets.Image(), self._reader(rows, column, where), where)
            for column in _flat(Of(inputs=self.inputs))
            if isinstance(features.get(column), datasets.Image)
        }

    def _reader(self, rows: Any, column: str, where: str) -> pixels.Reader:
        """Return the reader of all images. The first split that is asked for decides the mode."""
        cells = undecoded(rows, [column]).select_columns([column])
        if self.source["streaming"]:
            looked = [row[column] for row in islice(cells, _LOOKS)]
            samples = range(len(looked))
        else:
            samples = sorted({i * (len(cells) - 1) // (_LOOKS - 1) for i in range(_LOOKS)})
            looked = [cells[i][column] for i in samples if len(cells)]
        feature = extras.load("datasets", needed_by="data=hf").Image()
        opened = [
            _opened(feature, cell, where=f"{where}: sample {i}")
            for i, cell in zip(samples, looked, strict=False)
        ]
        if self._mode is None:
            self._mode = self.image_mode or pixels.common_mode(opened)
            if len(found := sorted({image.mode for image in opened})) > 1:
                log.info(
                    "%s: images of column %s have Pillow's modes %s; all are read as %s "
                    "(data.image_mode=%s).",
                    where, column, ", ".join(found), self._mode, self.image_mode or "null",
                )  # fmt: skip
        reader = pixels.Reader(self._mode, typed=self.image_mode is not None)
        for i, image in zip(samples, opened, strict=False):
            reader(image, where=f"{where}: sample {i}")
        return reader

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
        self._check_links()
        unreachable = self._unreachable
        try:
            with _offline(datasets) if unreachable else nullcontext():
                rows = self._loaded[split] = (
                    self._from_disk(datasets, self._saved_folder, name)
                    if self._saved_folder
                    else datasets.load_dataset(split=name, **self.source)
                )
            if not self.source["streaming"]:
                log.info("%s, split %s: %s samples.", self._where, name, f"{len(rows):,}")
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
    def _saved_folder(self) -> str | None:
        """The path, if save_to_disk wrote it."""
        if any(self.source[key] for key in ("name", "data_files", "data_dir")):
            return None
        folder = Path(self.path).expanduser()
        one = (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
        return str(folder) if one or (folder / "dataset_dict.json").is_file() else None

    def _from_disk(self, datasets: Any, folder: str, name: str | None) -> Any:
        """Return a split of a saved folder, of the same expressions as load_dataset's."""
        found = datasets.load_from_disk(folder)
        splits = {**found} if isinstance(found, datasets.DatasetDict) else {"train": found}
        sizes = {split: len(rows) for split, rows in splits.items()}
        parts = datasets.ReadInstruction.from_spec(name).to_absolute(sizes)
        rows = datasets.concatenate_datasets(
            [
                splits[part.splitname].with_format(None).select(range(part.from_, part.to))
                for part in parts
            ]
        )
        return rows.to_iterable_dataset() if self.source["streaming"] else rows

    def _check_links(self) -> None:
        """Raise ConfigError for links to folders of files, which datasets leaves out silently."""
        folder = self.source["data_dir"] or self.path
        if self.source["data_files"] or not os.path.isdir(folder):
            return
        for parent, names, _ in os.walk(folder):
            names[:] = [name for name in names if not name.startswith(".")]
            for name in names:
                if (link := Path(parent, name)).is_symlink():
                    raise ConfigError(
                        f"{self._where}: {link} is a link to a folder, which the package datasets "
                        "leaves out. Put the files there, or name them with data.data_files=… "
                        "(data=image_folder follows links)."
                    )

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
            or self._saved_folder
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


@dataclass(frozen=True)
class ImageColumn:
    """Reads the images of a column that datasets has not decoded."""

    feature: Any
    reader: pixels.Reader
    where: str

    def __call__(self, cell: Any, index: int | None) -> torch.Tensor:
        """Return pixels (C, H, W) in 8 bits. Raises ConfigError."""
        where = f"{self.where}: {'an image' if index is None else f'sample {index}'}"
        image = _opened(self.feature, cell, where=where)
        return torch.from_numpy(self.reader(image, where=where))


def undecoded(rows: Any, columns: Iterable[str]) -> Any:
    """Return the rows with images as their files' bytes or paths."""
    datasets = extras.load("datasets", needed_by="data=hf")
    for column in columns:
        rows = rows.cast_column(column, datasets.Image(decode=False))
    return rows


def _opened(feature: Any, cell: Any, *, where: str) -> Any:
    """Return an image. Raises ConfigError for an empty cell and a damaged image."""
    try:
        if cell is not None:
            return feature.decode_example(cell)
    except (OSError, ValueError, SyntaxError) as error:  # as Pillow's formats raise
        raise ConfigError(f"{where} cannot be read ({error}). Remove it.") from error
    raise ConfigError(f"{where} is empty. Remove it.")


class Columns(Dataset[dict[str, Any]]):
    """Two columns of a map-style data set."""

    def __init__(
        self,
        rows: Any,
        columns: Of,
        numbers: dict[Any, int] | None = None,
        *,
        where: str = "",
        images: dict[str, ImageColumn] | None = None,
    ) -> None:
        self.rows, self.columns, self.numbers, self.where = rows, columns, numbers, where
        self.images = images or {}

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
        return _sample(row, self.columns, self.numbers, self.images, index)


class StreamedColumns(IterableDataset[dict[str, Any]]):
    """Two columns of a streamed data set, read as data/iterable.py says."""

    def __init__(
        self,
        rows: Any,
        columns: Of,
        numbers: dict[Any, int] | None = None,
        *,
        images: dict[str, ImageColumn] | None = None,
    ) -> None:
        self.rows, self.columns, self.numbers, self.images = rows, columns, numbers, images or {}

    def set_epoch(self, epoch: int) -> None:
        self.rows.set_epoch(epoch)

    @override
    def __iter__(self) -> Any:
        return (_sample(row, self.columns, self.numbers, self.images) for row in self.rows)


def _sample(
    row: dict[str, Any],
    columns: Of,
    numbers: dict[Any, int] | None,
    images: dict[str, ImageColumn],
    index: int | None = None,
) -> dict[str, Any]:
    """Return a sample.

    `numbers`: of targets that are classes, by their text or their number in the data set.
    """
    row = {**row, **{column: read(row[column], index) for column, read in images.items()}}
    sample = {
        name: row[of] if isinstance(of, str) else _vector(row, of) for name, of in columns.items()
    }
    if numbers is not None and "targets" in sample:
        target = sample["targets"]
        sample["targets"] = torch.tensor(
            numbers[target if isinstance(target, str) else int(target)]
        )
    inputs = sample["inputs"]
    is_image = isinstance(inputs, torch.Tensor) and inputs.dtype == torch.uint8
    return {**sample, "inputs": inputs.float() / 255} if is_image else sample


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
