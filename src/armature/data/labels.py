"""Names that numbers stand for: classes, and the columns of a table.

They are kept beside the run (classes.json).

Numbered anew from other data, in which a class is missing or columns are in another order, they
would mean something else to the trained model.
"""

import json
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
from torch.utils.data import Subset
from typing_extensions import override

from armature import files
from armature.data.base import DataModule
from armature.errors import ConfigError

CLASSES_FILE = "classes.json"
_NAMED = 5  # names that a message shows of each kind
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?", re.ASCII)


def name_of(value: Any) -> str | None:
    """Return the name of a class, or None if the value is missing or not a single one.

    A whole number has one name: a column of floats, as pandas makes of integers with a gap, names
    the same classes as one of integers.
    """
    if value is None or isinstance(value, list | tuple | dict | np.ndarray):
        return None
    if value != value:  # NaN and NaT
        return None
    name = str(value).strip()
    return re.sub(r"\.0+$", "", name) if _NUMBER.fullmatch(name) else name or None


def ordered(names: Iterable[str]) -> list[str]:
    """Return names in the order of their numbers: numbers by value, before all others.

    In other names parts of digits are compared as numbers, so class_2 comes before class_10.
    """
    return sorted(set(names), key=_place)


def _place(name: str) -> tuple[bool, Any, str]:
    if _NUMBER.fullmatch(name):
        return False, Decimal(name), name
    parts = re.split(r"(\d+)", name, flags=re.ASCII)  # every second one consists of digits
    return True, [Decimal(part) if i % 2 else part for i, part in enumerate(parts)], name


def numbered_as(head: Sequence[str], found: Sequence[str]) -> list[str] | None:
    """Return the names that a trained head's numbers stand for, spelled as the data spell them.

    Data name a class as the head does, but for upper and lower case, or by its number. None: some
    of their names are neither.
    """
    known = {name.casefold(): i for i, name in enumerate(head)}
    numbers: list[Any] = [known.get(name.casefold()) for name in found]
    if None in numbers:
        if not all(re.fullmatch(r"\d{1,9}", name, re.ASCII) for name in found):
            return None
        numbers = [*map(int, found)]
        if any(known.get(name, i) != i for name, i in zip(found, numbers, strict=True)):
            return None
    if len({*numbers}) < len(found) or max(numbers, default=0) >= len(head):
        return None
    spelled = dict(zip(numbers, found, strict=True))
    return [spelled.get(i, name) for i, name in enumerate(head)]


class LabeledData(DataModule):
    """Base class of data whose targets are classes with names.

    Attributes:
        path: of the data, as typed.
        saved: the names that the trained model knows, by their kind, in the order of their numbers;
            None: number those of these data.
    """

    path: Any
    saved: dict[str, list[str]] | None = None

    def names(self) -> dict[str, list[str]]:
        """Return the names of these data in the order of their numbers: of "classes", or also of
        "features".
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method names().")

    @cached_property
    def _own_names(self) -> dict[str, list[str]]:
        return self.names()

    @property
    def classes(self) -> list[str] | None:
        """The classes in the order of their numbers.

        None if the targets are no classes with names.
        """
        return self.known.get("classes")

    @property
    @override
    def known(self) -> dict[str, list[str]]:
        return self._own_names if self.saved is None else self.saved

    def begin_with(self, classes: list[str]) -> None:
        """Number the classes as the head does that training begins with."""
        self.saved = {**self._own_names, "classes": classes}

    @property
    @override
    def found_sizes(self) -> dict[str, int]:
        return {key: len(names) for key, names in self._own_names.items()}

    @override
    def setup(self, stage: str) -> None:
        classes = self._own_names.get("classes") if stage == "fit" else None
        if classes is not None and len(classes) < 2:
            raise ConfigError(
                f"data.path={self.path}: the training data have "
                f"{f'the class {classes[0]} alone' if classes else 'no classes'}. Name data of at "
                "least two."
            )

    @override
    def save_assets(self, run_dir: Path) -> None:
        write(run_dir, self.known)

    @override
    def load_assets(self, run_dir: Path) -> None:
        self.saved = read(run_dir / CLASSES_FILE)

    def knows(self, found: Iterable[str]) -> bool:
        """Return whether all of these classes have numbers."""
        return set(found) <= set(self.classes or [])

    def numbers(self, found: Sequence[str], *, where: str) -> list[int]:
        """Return the numbers of classes.

        Raises ConfigError for one that the trained model does not know.
        """
        number = {name: i for i, name in enumerate(self.classes or [])}
        if unknown := sorted({*found} - number.keys()):
            raise ConfigError(
                f"{where} has the class{'es' * (len(unknown) > 1)} {_shown(unknown)}, which the "
                f"training data lack. They have {len(number)}: {_shown([*number])}. Remove or "
                "rename what is of another class; to predict samples of unknown classes, leave the "
                "classes out."
            )
        return [number[name] for name in found]


class DatasetClasses:
    """The classes that a dataset of users names, kept beside the run for other data."""

    tokens_per_sample: int | None = None
    prepares_on_every_rank = False

    def __init__(self, data: L.LightningDataModule) -> None:
        self._data, self._saved = data, None
        self.found_sizes: dict[str, int] = {}

    @property
    def class_names(self) -> list[str] | None:
        names = self._saved or getattr(self._data, "classes", None)
        return names if isinstance(names, list) else None

    @property
    def known(self) -> dict[str, list[str]]:
        loader: Any = self._data.train_dataloader()
        names = of_dataset(loader.dataset)
        return {} if names is None else {"classes": names}

    def save_assets(self, run_dir: Path) -> None:
        if self.known:
            write(run_dir, self.known)

    def load_assets(self, run_dir: Path) -> None:
        self._saved = (read(run_dir / CLASSES_FILE) or {}).get("classes")

    def check(self, dataset: Any, name: str) -> None:
        """Raise ConfigError for targets that mean other classes than in the training data."""
        then, now = self._saved or [], of_dataset(dataset) or []
        numbers = {each: i for i, each in enumerate(then)}
        # new ones and lacking last ones do no harm
        if any(numbers.get(each, i) != i for i, each in enumerate(now)):
            raise ConfigError(
                f"data: the {name} data number other classes than the training data: "
                f"{difference(then, now)}. Each class must have the number that it had then "
                f"({CLASSES_FILE} of the run)."
            )


def check_same(then: dict[str, list[str]], now: dict[str, list[str]]) -> None:
    """Raise ConfigError if names that both have by their kind are others, or in another order."""
    for what in sorted(then.keys() & now):
        if (found := difference(then[what], now[what])) is not None:
            raise ConfigError(
                f"data: the {what} are no longer those that the checkpoint was trained with: "
                f"{found}. Restore the data, or train on these from step 0: type another "
                "run.name."
            )


def of_dataset(dataset: Any) -> list[str] | None:
    """Return the attribute `classes` of a dataset, as torchvision's have it: names in the order of
    their numbers.
    """
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    names = getattr(dataset, "classes", None)
    if isinstance(names, list | tuple) and names and all(isinstance(name, str) for name in names):
        return list(names)
    return None


def difference(then: list[str], now: list[str]) -> str | None:
    """Return how two lists of names differ, or None if they are equal."""
    lost, new = ([n for n in a if n not in b] for a, b in ((then, now), (now, then)))
    parts = [f"{_shown(lost)} is missing"] if lost else []
    parts += [f"{_shown(new)} is new"] if new else []
    if not parts and then != now:
        parts = [f"their order was {_shown(then)}, and is {_shown(now)}"]
    return " and ".join(parts) or None


def _shown(names: list[str]) -> str:
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + rest


def read(file: Path) -> dict[str, list[str]] | None:
    """Return the names beside a run, or None if there are none.

    Raises ConfigError for a damaged file.
    """
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {key: [*map(str, names)] for key, names in found.items()}
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{file} is damaged. Copy it from another run on the same data, or type rm {file}."
        ) from error


def write(run_dir: Path, names: dict[str, list[str]]) -> None:
    """Keep names beside a run."""
    files.replace(run_dir / CLASSES_FILE, json.dumps(names, indent=2) + "\n")
