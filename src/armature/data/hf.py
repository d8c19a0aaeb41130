"""Hugging Face datasets: from the hub, or local files in any of its formats; map-style, or streamed."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from typing_extensions import override

from armature.data import extras
from armature.data.base import DataModule, Split
from armature.errors import ConfigError


class HFData(DataModule):
    """Samples {"inputs", "targets"} of two columns.

    Args:
        path: a name on the hub; or csv, json, parquet, text, imagefolder … with data_files or data_dir.
        name: the configuration of the data set, if it has several.
        data_files, data_dir: of local files.
        splits: their names there, for train, val and test; null: there is none.
        inputs, targets: columns.
        streaming: read the samples one after the other, without downloading all of them first.
        loader: batch sizes and the other arguments of DataModule.
    """

    def __init__(
        self, *, path: str, name: str | None = None, data_files: Any = None, data_dir: str | None = None,
        splits: dict[str, str | None] | None = None, inputs: str = "inputs", targets: str = "targets",
        streaming: bool = False, **loader: Any,
    ) -> None:  # fmt: skip
        super().__init__(**loader)
        files = data_files if data_files is None or isinstance(data_files, str) else _plain(data_files)
        self.source = {"path": path, "name": name, "data_files": files, "data_dir": data_dir, "streaming": streaming}
        self.splits = dict(splits or {"train": "train", "val": "validation", "test": "test"})
        self.columns = {"inputs": inputs, "targets": targets}

    @override
    def dataset(self, split: Split) -> Any:
        name = self.splits.get(split)
        if name is None:
            return None
        datasets = extras.load("datasets", needed_by="data=hf")
        try:
            made = datasets.load_dataset(split=name, **self.source)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"data.path={self.source['path']}, split {name}: {str(error).splitlines()[0]} Type "
                f"data.splits.{split}=… (null: there is none; 'train[:10%]': a part of another one)."
            ) from error
        known = made.column_names
        if known is not None and (missing := [column for column in self.columns.values() if column not in known]):
            raise ConfigError(
                f"data.path={self.source['path']} has no column {', '.join(missing)}. Its columns: {', '.join(known)}. "
                "Type data.inputs=… data.targets=…"
            )
        return (StreamedColumns if self.source["streaming"] else Columns)(made.with_format("torch"), self.columns)


class Columns(Dataset[dict[str, Any]]):
    """Two columns of a map-style data set."""

    def __init__(self, rows: Any, columns: dict[str, str]) -> None:
        self.rows, self.columns = rows, columns

    def __len__(self) -> int:
        return len(self.rows)

    @override
    def __getitem__(self, index: int) -> dict[str, Any]:
        return _sample(self.rows[index], self.columns)


class StreamedColumns(IterableDataset[dict[str, Any]]):
    """Two columns of a streamed data set, read as data/iterable.py says."""

    def __init__(self, rows: Any, columns: dict[str, str]) -> None:
        self.rows, self.columns = rows, columns

    def set_epoch(self, epoch: int) -> None:
        self.rows.set_epoch(epoch)

    @override
    def __iter__(self) -> Any:
        return (_sample(row, self.columns) for row in self.rows)


def _sample(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    sample = {name: row[column] for name, column in columns.items()}
    images = isinstance(sample["inputs"], torch.Tensor) and sample["inputs"].dtype == torch.uint8
    return {**sample, "inputs": sample["inputs"].float() / 255} if images else sample


def _plain(files: Any) -> Any:
    return {key: _plain(value) for key, value in files.items()} if hasattr(files, "items") else (
        files if isinstance(files, str) else list(files)
    )  # fmt: skip
