"""Images in folders, one folder per class: path/cat/1.jpg, or path/train/cat/1.jpg beside path/val
and path/test. Links are followed.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset
from typing_extensions import override

from armature.data import extras, sources
from armature.data.base import Batch, Split
from armature.data.labels import LabeledData, ordered
from armature.data.splits import split_indices
from armature.errors import ConfigError

log = logging.getLogger(__name__)

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"}
SPLIT_FOLDERS = {  # in lower case
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip


class ImageFiles(Dataset[Batch]):
    """Images (3, S, S), normalized, and classes, where they are known.

    In training a random crop is taken, and flipped half of the time.
    """

    def __init__(
        self,
        files: list[tuple[Path, int | None]],
        *,
        size: int,
        mean: list[float],
        std: list[float],
        flip: bool,
        margin: float,
    ) -> None:
        self.files, self.size, self.flip, self.margin = files, size, flip, margin
        self.mean, self.std = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))

    def __len__(self) -> int:
        return len(self.files)

    @override
    def __getitem__(self, index: int) -> Batch:
        """Return the image with its shorter side scaled to the size and the margin, cropped to a
        square there.
        """
        from PIL import Image, ImageOps

        path, target = self.files[index]
        try:
            with Image.open(path) as opened:
                upright = ImageOps.exif_transpose(opened)  # cameras store how to turn the picture
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            # as Pillow's formats raise
            raise ConfigError(
                f"data.path: {path} cannot be read as an image ({error}). Remove it."
            ) from error
        image = _rgb(upright, path)
        side = round(self.size * (1 + self.margin))
        scale = side / min(image.size)
        width, height = (max(side, round(length * scale)) for length in image.size)
        left, top = (width - side) // 2, (height - side) // 2
        image = image.resize((width, height), Image.Resampling.BILINEAR).crop(
            (left, top, left + side, top + side)
        )
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        targets = {} if target is None else {"targets": torch.tensor(target)}
        return {"inputs": (pixels - self.mean) / self.std, **targets}

    def describe(self, index: int) -> dict[str, str]:
        """Return what a row of predictions says of the sample."""
        return {"file": str(self.files[index][0])}

    def augment(self, sample: Batch, generator: torch.Generator) -> Batch:
        inputs = sample["inputs"]
        room = inputs.shape[-1] - self.size
        top, left, flipped = (
            torch.randint(0, high, (), generator=generator).item()
            for high in (room + 1, room + 1, 2)
        )
        inputs = inputs[:, top : top + self.size, left : left + self.size]
        return {
            "inputs": inputs.flip(-1) if self.flip and flipped else inputs,
            "targets": sample["targets"],
        }


class ImageFolderData(LabeledData):
    """Images (B, 3, S, S) and classes (B,), which are the folders' names in the order of
    `labels.ordered`.

    A trained model's classes keep their numbers. Predictions need no class folders.

    Args:
        path: a folder of class folders; or of `train`, `val` and `test` (or another of
            SPLIT_FOLDERS' names), each with class folders.
        size: side of an image in pixels (S).
        mean, std: of each channel, subtracted and divided by; pixels lie in [0, 1] before.
        flip: flip half of the training images.
        margin: a training image is cropped at random from one this share larger; 0: no random crop.
        val_fraction, test_fraction: shares of the images, where there are no folders of these
            names.
        loader: batch sizes and the other arguments of DataModule.
    """

    # read before launch
    model_sizes: ClassVar[dict[str, int | str]] = {"image_size": "size", "channels": 3}
    path: Path
    predict_split = "predict"  # all images below path; of the test folder, if there is one

    def __init__(
        self,
        *,
        path: str,
        size: int = 64,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        flip: bool = True,
        margin: float = 0.125,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        **loader: Any,
    ) -> None:
        super().__init__(**loader)
        self.path, self.size, self.flip, self.margin = Path(path).expanduser(), size, flip, margin
        self.mean, self.std = (
            list(mean or (0.485, 0.456, 0.406)),
            list(std or (0.229, 0.224, 0.225)),
        )
        self.fractions = {"val_fraction": val_fraction, "test_fraction": test_fraction}

    @override
    def dataset(self, split: Split) -> ImageFiles:
        extras.load("PIL.Image", needed_by="data=image_folder")
        training = split == "train"
        files = self._to_predict if split == "predict" else self._files[split]
        return ImageFiles(
            files, size=self.size, mean=self.mean, std=self.std, flip=self.flip,
            margin=self.margin if training else 0.0,
        )  # fmt: skip

    @override
    def names(self) -> dict[str, list[str]]:
        folder = self._split_folders().get("train", self.path)
        if not (found := _classes(folder)):
            raise ConfigError(
                f"data.path={folder}: it has no folder. Put the images of each class into one, as "
                "in "
                f"{folder}/cat/1.jpg."
            )
        empty = [name for name in found if next(_images_below(folder, name), None) is None]
        if empty and len(empty) < len(found):
            raise ConfigError(
                f"data.path={folder}: the folder {empty[0]} has no images ({_KINDS}). Put some "
                "there, or remove it: "
                "each folder is a class."
            )
        return {"classes": found}

    @cached_property
    def _files(self) -> dict[str, list[tuple[Path, int | None]]]:
        """The images of each split, with their classes."""
        folders = self._split_folders()
        left_out = {split: Counter[str]() for split in folders or ("data",)}
        if folders:
            found = {split: self._images(folders[split], left_out[split]) for split in folders}
            found = {"train": [], "val": [], "test": [], **found}
        else:
            every = self._images(self.path, left_out["data"])
            parts = split_indices(len(every), **self.fractions)
            found = {
                split: [every[i] for i in parts[split].tolist()]
                for split in ("train", "val", "test")
            }
        log.info(
            "data.path=%s: %s images.%s",
            self.path,
            ", ".join(f"{split} {len(files):,}" for split, files in found.items()),
            "".join(
                f" Left out of {split}: {', '.join(f'{n:,} {kind}' for kind, n in kinds.items())}."
                for split, kinds in left_out.items()
                if kinds
            ),
        )
        return found

    def _split_folders(self) -> dict[str, Path]:
        """Return the folders of train, val and test; none if the class folders lie in the path
        itself.

        Raises ConfigError for two folders of one split.
        """
        sources.check_class_folders(self.path)
        found: dict[str, Path] = {}
        for name in _classes(self.path):
            split = SPLIT_FOLDERS.get(name.lower())
            if split is not None:
                if split in found:
                    raise ConfigError(
                        f"data.path={self.path}: both {found[split].name} and {name} are names of "
                        f"the {split} split. Put their images into one folder, or rename one."
                    )
                found[split] = self.path / name
        is_class = self.saved is not None and any(
            folder.name in (self.classes or []) for folder in found.values()
        )
        return {} if is_class or ("train" not in found and self.saved is None) else found

    def _images(self, folder: Path, left_out: Counter[str]) -> list[tuple[Path, int | None]]:
        """Return a split's images with their classes, and count its other files in `left_out`."""
        present = _classes(folder)
        for file in _visible_files(folder):
            suffix = _suffix(file.name)
            left_out["images in no class folder" if suffix in SUFFIXES else _kind(suffix)] += 1
        numbers = self.numbers(present, where=f"data.path: {folder}")
        found: list[tuple[Path, int | None]] = [
            (file, number)
            for name, number in sorted(zip(present, numbers, strict=True), key=lambda pair: pair[1])
            for file in _files_below(folder, name, left_out)
        ]
        if not found:
            raise ConfigError(
                f"data.path={folder}: no images in class folders, as in {folder}/cat/1.jpg "
                f"({_KINDS})."
            )
        return found

    @cached_property
    def _to_predict(self) -> list[tuple[Path, int | None]]:
        """All images below the path, of its test or val folder if it has one: with classes if all
        are known.
        """
        folders = self._split_folders()
        folder = folders.get("test") or folders.get("val") or folders.get("train") or self.path
        loose = [file for file in _visible_files(folder) if _suffix(file.name) in SUFFIXES]
        in_folders = [file for name in _classes(folder) for file in _files_below(folder, name)]
        every = sorted([*loose, *in_folders])
        if not every:
            raise ConfigError(f"data.path={folder}: there are no images below it ({_KINDS}).")
        names = [file.relative_to(folder).parts[0] for file in every]
        numbers = (
            self.numbers(names, where=f"data.path: {folder}")
            if self.knows(names)
            else [None] * len(every)
        )
        return list(zip(every, numbers, strict=True))


def _visible_files(folder: Path) -> list[Path]:
    return [each for each in folder.iterdir() if each.is_file() and each.name[0] != "."]


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _kind(suffix: str) -> str:
    return f"files ending in {suffix}" if suffix else "files without an ending"


_KINDS = ", ".join(sorted(SUFFIXES))


def _classes(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, except hidden ones, in the classes' order."""
    below = (each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    return ordered(each.name for each in below)


def _rgb(image: Any, path: Path) -> Any:
    """Return the image with three channels of 8 bits.

    Pillow would clip grey values of more bits.
    """
    from PIL import Image

    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ConfigError(
            f"data.path: {path} has pixels of 32 bits (Pillow's mode {image.mode}), whose range is "
            "not known. Convert "
            "it to 8 bits."
        )
    return image if image.mode == "RGB" else image.convert("RGB")


def _files_below(root: Path, name: str, left_out: Counter[str] | None = None) -> list[Path]:
    return sorted(map(Path, _images_below(root, name, left_out)))


def _images_below(root: Path, name: str, left_out: Counter[str] | None = None) -> Iterator[str]:
    """Yield the files with an image's suffix below root/name, except hidden ones, and count the
    others in `left_out`.

    Links are followed, but to no folder that holds root/name, nor to one a second time: they would
    never end. Raises ConfigError for what only has its name.
    """
    start = root / name
    real = start.resolve()
    visited = {str(each) for each in (real, *real.parents, root.resolve())}
    folders = [(str(start), str(real))]
    while folders:
        folder, real_folder = folders.pop()
        with os.scandir(folder) as found:
            # links last, so that a folder has its own name where a link leads to it as well
            entries = sorted(found, key=lambda entry: (entry.is_symlink(), entry.name))
        entries = [entry for entry in entries if not entry.name.startswith(".")]
        for entry in entries:
            if not (entry.is_dir() or entry.is_file()) and (
                entry.is_symlink() or _suffix(entry.name) in SUFFIXES
            ):
                raise ConfigError(
                    f"data.path: {entry.path} is {sources.what(Path(entry.path))}. Remove it."
                )
        below = []
        for entry in entries:
            if entry.is_dir():
                real_path = os.path.join(real_folder, entry.name)
                if entry.is_symlink():
                    real_path = os.path.realpath(real_path)
                below.append((entry.path, real_path))
            elif _suffix(entry.name) in SUFFIXES:
                yield entry.path
            elif left_out is not None:
                left_out[_kind(_suffix(entry.name))] += 1
        for path, real_path in below:
            if real_path not in visited:
                visited.add(real_path)
                folders.append((path, real_path))
