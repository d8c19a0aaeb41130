"""Hugging Face datasets: from the hub, or local files in any of its formats; map-style, or
streamed.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from typing_extensions import override

from armature.data import extras, pixels
from armature.data.base import Split
from armature.data.labels import LabeledData, ordered
from armature.errors import ConfigError, error_line

log = logging.getLogger(__name__)


class HFData(LabeledData):
    """Samples {"inputs", "targets"} of two columns.

    Texts and booleans as targets are classes, numbered in the order of `labels.ordered`.

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
        image_mode: read images in this mode of Pillow's: L, RGB or RGBA. None: that of the first
            image; one that shows more is refused.
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
        inputs: str | list[str] = "inputs",
        targets: str = "targets",
        streaming: bool = False,
        classes: bool = True,
        image_mode: str | None = None,
    ) -> None:
        super().__init__()
        self.path, self.texts_are_classes, self.image_mode = path, classes, image_mode
        self.streaming = streaming
        self.source = {"name": name, "data_dir": data_dir, "data_files": data_files}
        self.splits = splits or {"train": "train", "val": "validation", "test": "test"}
        self.inputs, self.targets = inputs, targets
        if not self.inputs:
            raise ConfigError(
                f"data.inputs={inputs}: name a column, or several columns of numbers."
            )
        # rows by split, since a name on the hub is looked up at each load
        self._loaded: dict[str, Any] = {}

    @override
    def dataset(self, split: Split) -> Any:
        of = split
        if split == "predict":
            of = next((s for s in ("test", "val", "train") if self.splits.get(s)), "test")
        if self.splits.get(of) is None:
            return None
        rows, targets = self._load(of), self.targets
        where = f"{self._where}, split {self.splits[of]}"
        inputs = [self.inputs] if isinstance(self.inputs, str) else self.inputs
        has_targets = split != "predict" or targets in (rows.column_names or [targets])
        self._check(rows, [*inputs, targets] if has_targets else inputs)
        names, numbers = self._class_names(rows) if has_targets else None, None
        if names is not None and split == "predict" and not self.knows(names):
            has_targets = False  # they are not needed, and have no numbers
        elif names is not None:
            if split != "predict" and self._has_unlabeled(rows, split, where):
                return None
            found = self.numbers(names, where=f"{where}, column {targets},")
            keys = names if _is_text(rows, targets) else range(len(names))
            numbers = dict(zip(keys, found, strict=True)) | {-1: -1}  # -1: not labeled
        image = extras.load("datasets", needed_by="data=hf").Image
        images = [each for each in inputs if isinstance((rows.features or {}).get(each), image)]
        for column in images:  # else a damaged one is no answer that names it
            rows = rows.cast_column(column, image(decode=False))
        mode = self.image_mode
        if images and mode is None:  # all are read in that of the first in training
            modes = self.known.setdefault("image_mode", [])
            for first in rows.take(0 if modes else 1):
                modes.append(
                    pixels.mode_of(_opened(image(), first[images[0]], f"{where}: sample 0"))
                )
            mode = "".join(modes)
        read = Reader(
            where=where,
            inputs=self.inputs,
            targets=targets if has_targets else None,
            numbers=numbers,
            images=dict.fromkeys(images, image()),
            mode=mode or "RGB",
            mode_is_typed=self.image_mode is not None,
        )
        used = dict.fromkeys([*inputs, targets] if has_targets else inputs)
        rows = rows.select_columns([*used]).with_format("torch")  # a date would be no tensor
        return StreamedColumns(rows, read) if self.streaming else Columns(rows, read)

    @override
    def names(self) -> dict[str, list[str]]:
        classes = self._class_names(self._load("train")) if self.splits.get("train") else None
        return {} if classes is None else {"classes": classes}

    @property
    @override
    def found_sizes(self) -> dict[str, int]:
        found = super().found_sizes
        if "classes" in found or self.streaming or not self.splits.get("train"):
            return found
        rows = self._load("train")
        kind = str(getattr((rows.features or {}).get(self.targets), "dtype", None))
        if not kind.startswith(("int", "uint")):
            return {}
        numbers = [each for each in rows.unique(self.targets) if each is not None]
        return {"classes": max(numbers, default=-1) + 1}

    def _class_names(self, rows: Any) -> list[str] | None:
        """Return the names of the classes in the column of targets, or None if it holds numbers."""
        feature: Any = (rows.features or {}).get(self.targets)
        if hasattr(feature, "names"):
            return list(feature.names)
        if getattr(feature, "dtype", None) == "bool":
            return ["False", "True"]
        if not self.texts_are_classes or not _is_text(rows, self.targets):
            return None
        if self.streaming:
            raise ConfigError(
                f"data.targets={self.targets} holds texts, which a stream cannot number. Type "
                "data.streaming=false, or data.classes=false if they are no names of classes."
            )
        self._check(rows, [self.targets])
        return ordered(rows.unique(self.targets))

    def _has_unlabeled(self, rows: Any, split: Split, where: str) -> bool:
        """Return whether a class of the test split is -1, as public tests have it.

        Raises ConfigError for others.
        """
        if self.streaming or _is_text(rows, self.targets) or -1 not in rows.unique(self.targets):
            return False
        where = f"{where}: column {self.targets} holds -1, which is no class"
        if split != "test":
            raise ConfigError(
                f"{where}. Leave out these rows, or name another split: data.splits.{split}=…"
            )
        log.info("%s: the run does not test (data.splits.test=null).", where)
        return True

    def _check(self, rows: Any, columns: list[str]) -> None:
        known = rows.column_names
        if known is not None and (missing := [column for column in columns if column not in known]):
            raise ConfigError(
                f"{self._where} has no column {', '.join(missing)}. Its columns: "
                f"{', '.join(known)}. Type data.inputs=… data.targets=…"
            )
        for column in () if self.streaming else columns:
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
        is_format = (Path(datasets.packaged_modules.__file__).parent / self.path).is_dir()
        has_files = self.source["data_files"] or self.source["data_dir"]
        if is_format and self.path.isidentifier() and not has_files:
            raise ConfigError(  # it would read each file below the current folder
                f"data.path={self.path}: a format, but no files. Type data.data_files=… or "
                "data.data_dir=…, too."
            )
        self._check_links()
        options = self.source
        if self.path == "csv":  # pandas takes the texts NA, None and null for empty cells
            options = {**self.source, "keep_default_na": False, "na_values": [""]}
        try:
            if any(self.source.values()) or not (folder := _saved_folder(self.path)):
                rows = datasets.load_dataset(
                    self.path, split=name, streaming=self.streaming, **options
                )
            else:
                rows = _from_disk(datasets, folder, name, streaming=self.streaming)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            is_theirs = isinstance(error, datasets.exceptions.DatasetsError)
            said = error_line((error.__cause__ if is_theirs else None) or error).rstrip(".!")
            part = "" if self.streaming else "; 'train[:10%]': a part of another one"
            raise ConfigError(
                f"{self._where}, split {name}: {said}. Type data.splits.{split}=… (null: there is "
                f"none{part}), or data.path=…, data.name=… or "
                "data.data_files=… of data that are there."
            ) from error
        if not self._loaded:
            self._note_left_out(datasets)
        if not self.streaming:
            log.info("%s, split %s: %s samples.", self._where, name, f"{len(rows):,}")
        self._loaded[split] = rows
        return rows

    def _check_links(self) -> None:
        """Raise ConfigError for links to folders of files, which datasets leaves out silently."""
        if self.source["data_files"]:
            return
        for parent, names, _ in os.walk(self.source["data_dir"] or self.path):
            if links := [name for name in names if Path(parent, name).is_symlink()]:
                raise ConfigError(
                    f"{self._where}: {Path(parent, links[0])} is a link to a folder, which the "
                    "package datasets leaves out. Put the files there, or name them with "
                    "data.data_files=… (data=image_folder follows links)."
                )

    def _note_left_out(self, datasets: Any) -> None:
        """Log files of a folder that datasets takes for no split, because of others' names."""
        root = Path(self.source["data_dir"] or self.path)
        if self.source["data_files"] or not root.is_dir() or _saved_folder(self.path):
            return
        chosen = datasets.load_dataset_builder(self.path, **self.source).config.data_files or {}
        used = {Path(file).resolve() for files in chosen.values() for file in files}
        kinds = {file.suffix for file in used}
        there = {each.resolve() for each in root.rglob("*") if each.suffix in kinds}
        if others := sorted(there - used):
            log.warning(
                "%s: %s of its files are left out, as %s is: the package datasets finds splits by "
                "the names of files and folders. Name them with data.data_files=….",
                self._where, f"{len(others):,}", others[0],
            )  # fmt: skip

    @property
    def _where(self) -> str:
        """The data, for messages: a format alone, such as csv, says nothing."""
        files = self.source["data_files"] or self.source["data_dir"]
        return f"data.path={self.path}" + (f" ({files})" if files else "")


@dataclass(frozen=True)
class Reader:
    """Makes a sample of a row.

    Attributes:
        numbers: of targets that are classes, by their text or their number in the data set.
        images: columns of images, whose features decode them.
    """

    where: str
    inputs: str | list[str]
    targets: str | None
    numbers: dict[Any, int] | None
    images: dict[str, Any]
    mode: str
    mode_is_typed: bool

    def __call__(self, row: dict[str, Any], index: int | None = None) -> dict[str, Any]:
        place = f"{self.where}: {'an image' if index is None else f'sample {index}'}"
        for column, feature in self.images.items():
            image = _opened(feature, row[column], place)
            found = pixels.read(image, self.mode, typed=self.mode_is_typed, where=place)
            row = {**row, column: torch.from_numpy(found)}
        inputs = row[self.inputs] if isinstance(self.inputs, str) else _vector(row, self.inputs)
        is_image = isinstance(inputs, torch.Tensor) and inputs.dtype == torch.uint8
        sample = {"inputs": inputs.float() / 255 if is_image else inputs}
        if self.targets is None:
            return sample
        target = row[self.targets]
        if self.numbers is not None:
            key = target if isinstance(target, str) else int(target)
            target = torch.tensor(self.numbers[key])
        return {**sample, "targets": target}


class Columns(Dataset[dict[str, Any]]):
    """Two columns of a map-style data set, of which `read` makes samples."""

    def __init__(self, rows: Any, read: Reader) -> None:
        self.rows, self.read = rows, read

    def __len__(self) -> int:
        return len(self.rows)

    @override
    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.read(self.rows[index], index)


class StreamedColumns(IterableDataset[dict[str, Any]]):
    """Two columns of a streamed data set, read as data/iterable.py says."""

    def __init__(self, rows: Any, read: Reader) -> None:
        self.rows, self.read = rows, read

    def set_epoch(self, epoch: int) -> None:
        self.rows.set_epoch(epoch)

    @override
    def __iter__(self) -> Any:
        return map(self.read, self.rows)


def _saved_folder(path: str) -> str | None:
    """Return the path, if save_to_disk wrote it."""
    folder = Path(path).expanduser()
    one = (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    return str(folder) if one or (folder / "dataset_dict.json").is_file() else None


def _from_disk(datasets: Any, folder: str, name: str | None, *, streaming: bool) -> Any:
    """Return a split of a saved folder, of the same expressions as load_dataset's."""
    found = datasets.load_from_disk(folder)
    splits = {**found} if isinstance(found, datasets.DatasetDict) else {"train": found}
    sizes = {split: len(rows) for split, rows in splits.items()}
    rows = datasets.concatenate_datasets([
        splits[part.splitname].with_format(None).select(range(part.from_, part.to))
        for part in datasets.ReadInstruction.from_spec(name).to_absolute(sizes)
    ])  # fmt: skip
    return rows.to_iterable_dataset() if streaming else rows


def _opened(feature: Any, cell: Any, where: str) -> Any:
    with pixels.readable(where):  # an empty cell, too
        return feature.decode_example(cell)


def _vector(row: dict[str, Any], columns: Sequence[str]) -> torch.Tensor:
    values = [row[column] for column in columns]
    for column, value in zip(columns, values, strict=True):
        if not isinstance(value, torch.Tensor) or value.ndim:
            raise ConfigError(
                f"data.inputs={columns}: column {column} holds no single numbers but {value!r:.60} "
                "(one cell such as NA makes texts of a whole column). Mend it, leave it out, or "
                f"type data.inputs={column} for it alone."
            )
    return torch.stack([value.float() for value in values])


def _is_text(rows: Any, column: str) -> bool:
    return getattr((rows.features or {}).get(column), "dtype", None) in ("string", "large_string")
