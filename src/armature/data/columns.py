"""Columns of CSV, JSON lines and Parquet files, read by pyarrow, and the shares of rows that are
held out.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armature.data import extras, sources
from armature.data.labels import name_of
from armature.data.sampler import permuted
from armature.errors import ConfigError, error_line

KINDS = {".csv": "CSV in UTF-8", ".jsonl": "lines of JSON in UTF-8", ".parquet": "Parquet"}
_LONGEST_ROW_BYTES = 1 << 26  # of a CSV file or JSON lines


def read(path: str | list[str], *, texts: list[str]) -> Any:
    """Return the rows of all files as one pyarrow.Table; `texts` are columns that stay as typed.

    Raises ConfigError.
    """
    arrow = extras.load("pyarrow", needed_by=f"data.path={path}")
    tables = [_read(file.path, texts) for file in sources.find(path)]
    try:  # a column that a file lacks is empty there, which is refused if it is used
        return arrow.concat_tables(tables, promote_options="permissive")
    except arrow.ArrowException as error:
        raise ConfigError(f"data.path={path}: the files differ: {error_line(error)}.") from error


def _read(file: Path, texts: list[str]) -> Any:
    import pyarrow
    from pyarrow import csv, json, parquet

    form = Path(file.name.removesuffix(".gz")).suffix
    if form not in KINDS:
        raise ConfigError(f"data.path={file}: name .csv, .jsonl or .parquet files.")
    try:
        if form == ".parquet":
            return parquet.read_table(file)
        if form == ".jsonl":
            # one thread alone knows the number of a wrong row
            options = json.ReadOptions(use_threads=False, block_size=_LONGEST_ROW_BYTES)
            table = json.read_json(file, read_options=options)
            table.validate(full=True)  # texts that are no UTF-8
            return table
        table = csv.read_csv(
            file,
            read_options=csv.ReadOptions(use_threads=False, block_size=_LONGEST_ROW_BYTES),
            parse_options=csv.ParseOptions(newlines_in_values=True),
            convert_options=csv.ConvertOptions(
                column_types=dict.fromkeys(texts, pyarrow.string()),
                null_values=[""],  # NA, null and nan are texts
                strings_can_be_null=True,
            ),
        )
    except (OSError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"data.path={file} cannot be read as {KINDS[form]} ({error_line(error)[:200]}). Mend "
            "it, write it again, or remove it."
        ) from error
    names = table.column_names
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"data.path={file}: two columns are named {', '.join(repeated)}. Rename one of them; "
            "the first line of a CSV file holds the names."
        )
    last = table[-1][-1].as_py() if table.num_rows else None
    # pyarrow takes the rest of the file into such a cell
    if isinstance(last, str) and "\n" in last and file.read_bytes().count(b'"') % 2:
        raise ConfigError(
            f"data.path={file}: in row {table.num_rows + 1} a quote is opened and never closed. "
            "Close it."
        )
    return table


def numbers(column: Any, where: str) -> NDArray[np.float32]:
    """Return a column as numbers of 32 bits. Raises ConfigError with the row of what is none."""
    import pyarrow

    try:
        values = _plain(column).cast(pyarrow.float64(), safe=False).to_numpy()
    except pyarrow.ArrowException as error:
        raise ConfigError(
            f"{where} has the type {column.type}, which holds no numbers "
            f"({error_line(error)}). Leave it out of data.features, or turn it into numbers first."
        ) from error
    with np.errstate(over="ignore"):  # reported below
        found = values.astype(np.float32)
    if len(wrong := np.flatnonzero(~np.isfinite(found))):
        value = column[int(wrong[0])].as_py()
        raise ConfigError(
            f"{where} {'is empty' if value is None else f'holds {value!r}'} in "
            f"data row {wrong[0] + 1}, where a finite number of 32 bits is needed. Fill it in, or "
            "leave the column or the row out."
        )
    return found


def classes(column: Any, where: str) -> tuple[list[str], NDArray[np.int64]]:
    """Return the names of a column's classes, and the index of each row's.

    Raises ConfigError for an empty cell, and for lists.
    """
    if column.type.num_fields:
        raise ConfigError(
            f"{where} holds {column.type}, not one value. Type data.target=… for another column."
        )
    encoded = _plain(column).dictionary_encode("encode").combine_chunks()
    names = [name_of(value) for value in encoded.dictionary.to_pylist()]
    indices = encoded.indices.to_numpy()
    if None in names:
        row = np.flatnonzero(indices == names.index(None))[0]
        raise ConfigError(f"{where} is empty in data row {row + 1}. Fill it in.")
    found = {each: i for i, each in enumerate(dict.fromkeys(names))}
    return [*map(str, found)], np.array([found[each] for each in names])[indices]


def _plain(column: Any) -> Any:
    """Return a column without the dictionary that a category has."""
    import pyarrow

    is_category = pyarrow.types.is_dictionary(column.type)
    return column.cast(column.type.value_type) if is_category else column


def split_indices(
    size: int, *, val_fraction: float, test_fraction: float,
    fold: int | None = None, folds: int | None = None,
) -> dict[str, NDArray[np.int64]]:  # fmt: skip
    """Return the indices of each split, drawn at random but always alike; "predict" has all.

    "val" is one of the folds into which all but the test samples fall, if there are folds.
    """
    val, test = (round(size * fraction) for fraction in (val_fraction, test_fraction))
    order = permuted(np.arange(size), size=size, seed="split", epoch=0)
    parts = {"val": order[:val], "test": order[val : val + test], "train": order[val + test :]}
    if fold is not None and folds is not None:
        rest = np.delete(order, np.s_[val : val + test])
        if len(rest) < folds:
            raise ConfigError(f"data.folds={folds}: {len(rest)} samples. Type a lower number.")
        parts |= {"val": rest[fold::folds], "train": np.delete(rest, np.s_[fold::folds])}
    return {"predict": np.arange(size), **{name: np.sort(part) for name, part in parts.items()}}
