"""Images in folders, one folder per class: path/cat/1.jpg, or path/train/cat/1.jpg beside path/val
and path/test. Links are followed.
"""

from __future__ import annotations

import logging
import os
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset
from typing_extensions import override

from armature.data import extras, pixels, sources
from armature.data.base import Batch, Split
from armature.data.columns import split_indices
from armature.data.labels import LabeledData, ordered
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
        image = pixels.converted(upright, "RGB", where=f"data.path: {path}")
        side = round(self.size * (1 + self.margin))
        scale = side / min(image.size)
        width, height = (max(side, round(length * scale)) for length in image.size)
        left, top = (width - side) // 2, (height - side) // 2
        image = image.resize((width, height), Image.Resampling.BILINEAR).crop(
            (left, top, left + side, top + side)
        )
        values = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        targets = {} if target is None else {"targets": torch.tensor(target)}
        return {"inputs": (values - self.mean) / self.std, **targets}

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
        fold, folds: hold out this one of so many parts of the other samples, not val_fraction.
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
        fold: int | None = None,
        folds: int | None = None,
    ) -> None:
        super().__init__()
        self.path, self.size, self.flip, self.margin = Path(path).expanduser(), size, flip, margin
        self.mean, self.std = (
            mean or [0.485, 0.456, 0.406],
            std or [0.229, 0.224, 0.225],
        )
        self.held_out: Any = {"val_fraction": val_fraction, "test_fraction": test_fraction}
        self.held_out |= {"fold": fold, "folds": folds}

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
        found = {name: bool(_images(folder / name)) for name in _folders(folder)}
        if not found:
            raise ConfigError(
                f"data.path={folder}: it has no folder. Put the images of each class into one, as "
                f"in {folder}/cat/1.jpg."
            )
        if empty := [name for name, has_images in found.items() if not has_images]:
            raise ConfigError(
                f"data.path={folder}: the folder {empty[0]} has no images ({_KINDS}). Put some "
                "there, or remove it: each folder is a class."
            )
        return {"classes": [*found]}

    @cached_property
    def _files(self) -> dict[str, list[tuple[Path, int | None]]]:
        """The images of each split, with their classes."""
        left_out: list[Path] = []
        found: dict[str, list[tuple[Path, int | None]]] = {"train": [], "val": [], "test": []}
        folders = self._split_folders()
        for split, folder in (folders or {"train": self.path}).items():
            names = _folders(folder)
            numbers = self.numbers(names, where=f"data.path: {folder}")
            for name, number in sorted(zip(names, numbers, strict=True), key=lambda pair: pair[1]):
                found[split] += [(file, number) for file in _images(folder / name, left_out)]
            loose = (each for each in folder.iterdir() if each.is_file() and each.name[0] != ".")
            left_out += loose  # in no class folder
        if not folders or self.held_out["folds"]:
            every, test = found["train"] + found["val"], found["test"]
            held_out = self.held_out | ({"val_fraction": 0, "test_fraction": 0} if folders else {})
            parts = split_indices(len(every), **held_out)
            found = {split: [every[i] for i in parts[split].tolist()] for split in found}
            found["test"] += test
        log.info(
            "data.path=%s: %s images.%s",
            self.path,
            ", ".join(f"{split} {len(files):,}" for split, files in found.items()),
            f" {len(left_out):,} files are no images in class folders and left out, such as "
            f"{min(left_out)}."
            if left_out
            else "",
        )
        return found

    def _split_folders(self) -> dict[str, Path]:
        """Return the folders of train, val and test; none if the class folders lie in the path
        itself.

        Raises ConfigError for two folders of one split.
        """
        sources.check_class_folders(self.path)
        found: dict[str, Path] = {}
        for name in _folders(self.path):
            if (split := SPLIT_FOLDERS.get(name.lower())) is None:
                continue
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

    @cached_property
    def _to_predict(self) -> list[tuple[Path, int | None]]:
        """All images below the path, of its test or val folder if it has one: with classes if all
        are known.
        """
        folders = self._split_folders()
        folder = folders.get("test") or folders.get("val") or folders.get("train") or self.path
        if not (every := _images(folder)):
            raise ConfigError(f"data.path={folder}: there are no images below it ({_KINDS}).")
        names = [file.relative_to(folder).parts[0] for file in every]
        known = self.knows(names)
        where = f"data.path: {folder}"
        numbers = self.numbers(names, where=where) if known else [None] * len(every)
        return list(zip(every, numbers, strict=True))


_KINDS = ", ".join(sorted(SUFFIXES))


def _folders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, except hidden ones, in the classes' order."""
    return ordered(p.name for p in folder.iterdir() if p.is_dir() and p.name[0] != ".")


def _images(root: Path, left_out: list[Path] | None = None) -> list[Path]:
    """Return the files with an image's suffix below a folder, except hidden ones, and add the
    others to `left_out`.

    Links are followed, but to no folder that holds the root, nor to one a second time: they would
    never end. Raises ConfigError for a link to what is not there.
    """
    found: list[Path] = []
    visited = {root.resolve(), *root.resolve().parents}
    for folder, folders, names in os.walk(root, followlinks=True):
        below = [Path(folder, name) for name in folders if name[0] != "."]
        folders.clear()
        # links last, so that a folder has its own name where a link leads to it as well
        for path in sorted(below, key=lambda path: (path.is_symlink(), path.name)):
            if path.resolve() not in visited:
                visited.add(path.resolve())
                folders.append(path.name)
        for path in (Path(folder, name) for name in names if name[0] != "."):
            if path.suffix.lower() in SUFFIXES:
                found.append(path)
            elif not path.exists():
                raise ConfigError(f"data.path: {path} is a link to what is not there. Remove it.")
            elif left_out is not None:
                left_out.append(path)
    return sorted(found)
