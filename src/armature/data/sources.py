"""Finds text files and reads them piece by piece, so that a corpus may be larger than memory.

Torch-free.
"""

import difflib
import glob
import gzip
import hashlib
import itertools
import json
import os
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from armature.errors import ConfigError

PIECE_BYTES = 1 << 20  # part of a file that is in memory at once
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_GOLDEN_RATIO = 0.6180339887498949


@dataclass(frozen=True)
class SourceFile:
    """A file of a corpus.

    `name`, the path relative to the corpus, decides the split, wherever the corpus lies.
    """

    path: Path
    name: str
    size: int
    mtime_ns: int


class Piece(NamedTuple):
    """A part of a file's text.

    `number` counts the file's pieces; `starts` is True if a document begins here.
    """

    file: SourceFile
    number: int
    starts: bool
    text: str
    size: int  # bytes of UTF-8


def standard_library() -> list[SourceFile]:
    """Return the running Python's library, without tests and installed packages: about twelve
    megabytes of code.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _NOT_LIBRARY)
        found += [_source(Path(folder, name), root) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda file: file.name)


def find(path: str | list[str]) -> list[SourceFile]:
    """Return the files named by a path, a folder, a pattern (`**` descends folders) or a list of
    these, sorted by name.

    Raises ConfigError if one of them names nothing, with the nearest existing name.
    """
    found: dict[Path, SourceFile] = {}
    problems = []
    for pattern in [path] if isinstance(path, str) else path:
        expanded = Path(pattern).expanduser()
        if expanded.is_file():
            root, paths = expanded.parent, [str(expanded)]
        else:
            fixed = itertools.takewhile(lambda part: not glob.has_magic(part), expanded.parts[:-1])
            root, matched = (
                (expanded, Path(glob.escape(str(expanded)), "**"))
                if expanded.is_dir()
                else (Path(*fixed), expanded)
            )
            paths = [p for p in glob.glob(str(matched), recursive=True) if os.path.isfile(p)]
        if not paths:
            problems.append(_nothing_found(pattern, expanded))
        for name in paths:
            found.setdefault(Path(name).resolve(), _source(Path(name), root))
    if problems:
        raise ConfigError(problems)
    return sorted(found.values(), key=lambda file: (file.name, str(file.path)))


def check_class_folders(path: str | Path) -> None:
    """Raise ConfigError if there is no folder, which is to hold a folder of images per class."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"data.path={folder}: there is no such folder. Name one with a folder per class."
        )


def stamp(files: list[SourceFile]) -> bytes:
    """Return every file's name, which may be no UTF-8, size and time, for the key of what is made
    of them.
    """
    return "".join(f"{file.name}\0{file.size}\0{file.mtime_ns}\n" for file in files).encode(
        errors="surrogatepass"
    )


def _source(path: Path, root: Path) -> SourceFile:
    try:
        stat = path.stat()
    except OSError as error:
        raise ConfigError(f"data.path: {path} cannot be read ({error.strerror}).") from error
    return SourceFile(path, path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns)


def _nothing_found(typed: str, pattern: Path) -> str:
    """Return what is missing, and what is there in its place."""
    there = next(each for each in (pattern, *pattern.parents) if each.is_dir())
    if there == pattern:
        return f"data.path={typed}: the folder holds no files. Put some there, or name another one."
    if os.path.lexists(pattern):
        return (
            f"data.path={typed}: {pattern} is a link to what is not there, a device or a "
            "pipe. Name a file, or a folder of files."
        )
    missing, names = pattern.parts[len(there.parts) :], sorted(p.name for p in there.glob("[!.]*"))
    near = difflib.get_close_matches(missing[0], names, n=1, cutoff=0.7)
    listed = f"It has {', '.join(names[:5])} …" if len(missing) == 1 else "Name a path that exists."
    hint = f"Did you mean {there / near[0]}?" if near else listed
    return f"data.path={typed}: {there.absolute()} has no {'/'.join(missing)}. {hint}"


def pieces(file: SourceFile, *, field: str, piece_bytes: int) -> Iterator[Piece]:
    """Yield the text of a file: pieces of a plain file, cut at line ends if there are any, or the
    records of JSONL.

    Raises ConfigError with the file and the byte or line, if it is not UTF-8 or not JSONL with that
    field.
    """
    if file.path.name.removesuffix(".gz").endswith(".jsonl"):
        yield from _records(file, field)
        return
    with _open(file) as stream:
        rest, offset, number = b"", 0, 0
        while block := stream.read(piece_bytes):
            rest += block
            cut = rest.rfind(b"\n") + 1 or _whole_characters(rest)
            if cut:
                yield Piece(file, number, number == 0, _decode(file, rest[:cut], offset), cut)
                rest, offset, number = rest[cut:], offset + cut, number + 1
        if rest:
            yield Piece(file, number, number == 0, _decode(file, rest, offset), len(rest))


def json_lines(file: SourceFile) -> Iterator[tuple[str, object]]:
    """Yield where each line of a .jsonl or .jsonl.gz file is, for messages, and its value.

    Empty lines do not count.

    Raises ConfigError with the line's number for one that is not JSON.
    """
    with _open(file) as stream:
        for line_number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"data.path: {file.path}, line {line_number}"
            try:
                value = json.loads(line.decode("utf-8-sig"))  # programs on Windows begin files so
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{where}: not a line of JSON in UTF-8 ({error}). Correct or remove it."
                ) from error
            yield where, value


def shown(value: object) -> str:
    """Return a value as JSON, of at most 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str).encode(errors="replace").decode()
    return text if len(text) <= 60 else f"{text[:57]}…"


def _records(file: SourceFile, field: str) -> Iterator[Piece]:
    for number, (where, record) in enumerate(json_lines(file)):
        try:
            text = cast(Any, record)[field]
            size = len(text.encode())
        except (KeyError, TypeError, AttributeError, UnicodeEncodeError) as error:
            raise ConfigError(
                f"{where}: {shown(record)} has no text in the field {field!r}. Correct the line, "
                "or name the field with the text: data.source.field=…"
            ) from error
        yield Piece(file, number, True, text, size)


@contextmanager
def _open(file: SourceFile) -> Iterator[BinaryIO]:
    try:
        with gzip.open(file.path) if file.path.suffix == ".gz" else file.path.open("rb") as stream:
            yield cast(BinaryIO, stream)
    except (OSError, EOFError, zlib.error) as error:
        # cannot be opened, is not a gzip file, or is a truncated one
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"data.path: {file.path} cannot be read ({reason}). Write it again, or remove it."
        ) from error


def _decode(file: SourceFile, data: bytes, offset: int) -> str:
    wrong = data.find(b"\0")  # which UTF-8 admits, and no text has
    try:
        if wrong < 0:
            return data.decode()
    except UnicodeDecodeError as error:
        wrong = error.start
    raise ConfigError(
        f"data.path: {file.path} is not UTF-8 text (byte {offset + wrong:,} is "
        f"0x{data[wrong]:02x}). Leave it out, or convert it, for example: iconv -f latin1 -t utf-8 "
        "(or -f utf-16); Parquet with pandas: read_parquet('x.parquet').to_json('x.jsonl', "
        "orient='records', lines=True)."
    )


def _whole_characters(data: bytes) -> int:
    """Return how many bytes from the start end at a character's end."""
    for back in range(1, min(4, len(data)) + 1):
        # the first byte of a character that may continue beyond the end
        if data[-back] & 0xC0 != 0x80:
            return len(data) - back
    return len(data)


@dataclass(frozen=True)
class Splitter:
    """Decides what is held out: whole files by a hash of their names, or pieces if there are too
    few files.

    By file, a file's split does not change when other files come or go, and no file is in two
    splits. With only a few files the hash may give a split nothing or most of the corpus. Then
    pieces (records of JSONL, or some lines of a plain file) are assigned instead: piece k of a file
    has the place (hash of the name + k × golden ratio) mod 1, which spreads any share evenly over
    the file.
    """

    by: Literal["file", "piece"]
    val_fraction: float
    test_fraction: float
    piece_bytes: int

    @classmethod
    def choose(
        cls, files: list[SourceFile], *, val_fraction: float, test_fraction: float
    ) -> "Splitter":
        """Split by file if each held-out split then gets between a quarter and four times its
        fraction of the bytes.
        """
        by_file = cls("file", val_fraction, test_fraction, PIECE_BYTES)
        total = sum(file.size for file in files)
        sizes = Counter[str]()
        for file in files:
            sizes[by_file(file, 0)] += file.size
        wanted = {"val": val_fraction * total, "test": test_fraction * total}
        if all(size / 4 <= sizes[split] <= size * 4 for split, size in wanted.items()):
            return by_file
        return cls("piece", val_fraction, test_fraction, min(max(total // 400, 256), PIECE_BYTES))

    def __call__(self, file: SourceFile, piece: int) -> str:
        place = hash_place(file.name)
        if self.by == "piece":
            place = (place + piece * _GOLDEN_RATIO) % 1.0
        return split_of(place, self.val_fraction, self.test_fraction)


def split_of(place: float, val_fraction: float, test_fraction: float) -> str:
    """Return the split that a place in [0, 1) belongs to."""
    if place < val_fraction:
        return "val"
    return "test" if place < val_fraction + test_fraction else "train"


def hash_place(name: str) -> float:
    """Return a number in [0, 1) that depends on the name alone, on every machine."""
    return (
        int.from_bytes(hashlib.sha256(name.encode(errors="surrogatepass")).digest()[:8], "big")
        / 2**64
    )
