"""Images in folders, one folder per class: path/cat/1.jpg, or path/train/cat/1.jpg beside path/val
and path/test. Links are followed.
"""

import logging
import os
from functools import cached_property
from pathlib import Path
from typing import ClassVar

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
SPLIT_FOLDERS = {  # in lower case, without _set at the end
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip


class ImageFiles(Dataset[Batch]):
    """Images (3, S, S), normalized, and classes, where they are known.

    In training a random crop is taken, and flipped half of the time.

    Args:
        files: images and the numbers of their classes.
        data: the sizes, and how images are normalized.
        margin: as of `ImageFolderData`; 0: the middle is cropped.
    """

    def __init__(
        self, files: list[tuple[Path, int | None]], data: "ImageFolderData", *, margin: float
    ) -> None:
        self.files, self.size, self.flip, self.margin = files, data.size, data.flip, margin
        self.mean, self.std = (torch.tensor(v).view(3, 1, 1) for v in (data.mean, data.std))

    def __len__(self) -> int:
        return len(self.files)

    @override
    def __getitem__(self, index: int) -> Batch:
        """Return the image with its shorter side scaled to the size and the margin, cropped to a
        square there.
        """
        from PIL import Image, ImageOps

        path, target = self.files[index]
        with pixels.readable(f"data.path: {path}"), Image.open(path) as opened:
            upright = ImageOps.exif_transpose(opened)  # cameras store how to turn the picture
        image = pixels.converted(upright, "RGB", where=f"data.path: {path}")
        side = round(self.size * (1 + self.margin))
        image = ImageOps.fit(image, (side, side), Image.Resampling.BILINEAR)
        values = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        targets = {} if target is None else {"targets": torch.tensor(target)}
        return {"inputs": (values - self.mean) / self.std, **targets}

    def describe(self, index: int) -> dict[str, str]:
        """Return what a row of predictions says of the sample."""
        return {"file": str(self.files[index][0])}

    def augment(self, sample: Batch, generator: torch.Generator) -> Batch:
        inputs, size = sample["inputs"], self.size
        room = inputs.shape[-1] - size
        top, left, flipped = (
            torch.randint(0, high, (), generator=generator).item()
            for high in (room + 1, room + 1, 2)
        )
        inputs = inputs[:, top : top + size, left : left + size]
        return {**sample, "inputs": inputs.flip(-1) if self.flip and flipped else inputs}


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
        self.mean, self.std = mean or [0.485, 0.456, 0.406], std or [0.229, 0.224, 0.225]
        self.held_out = {"val_fraction": val_fraction, "test_fraction": test_fraction}
        self.fold, self.folds = fold, folds

    @override
    def dataset(self, split: Split) -> ImageFiles:
        extras.load("PIL.Image", needed_by="data=image_folder")
        files = self._to_predict if split == "predict" else self._files[split]
        return ImageFiles(files, self, margin=self.margin if split == "train" else 0.0)

    @override
    def names(self) -> dict[str, list[str]]:
        folder = self._split_folders().get("train", self.path)
        names = _folders(folder)
        if not names:
            raise ConfigError(
                f"data.path={folder}: it has no folder. Put the images of each class into one, as "
                f"in {folder}/cat/1.jpg."
            )
        for name in names:
            if not _images(folder / name)[0]:
                raise ConfigError(
                    f"data.path={folder}: the folder {name} has no images ({_KINDS}). Put some "
                    "there, or remove it: each folder is a class."
                )
        return {"classes": names}

    @cached_property
    def _files(self) -> dict[str, list[tuple[Path, int | None]]]:
        """The images of each split, with their classes."""
        left_out: list[Path] = []
        found: dict[str, list[tuple[Path, int | None]]] = {"train": [], "val": [], "test": []}
        folders = self._split_folders()
        for split, folder in (folders or {"train": self.path}).items():
            names = _folders(folder)
            numbers = self.numbers(names, where=f"data.path: {folder}")
            for number, name in sorted(zip(numbers, names, strict=True)):
                images, others = _images(folder / name)
                found[split] += [(file, number) for file in images]
                left_out += others
            # in no class folder
            left_out += [each for each in folder.iterdir() if each.is_file() and _is_shown(each)]
        if not folders or self.folds:
            every, test = found["train"] + found["val"], found["test"]
            held_out = dict.fromkeys(self.held_out, 0) if folders else self.held_out
            parts = split_indices(len(every), **held_out, fold=self.fold, folds=self.folds)
            found = {split: [every[i] for i in parts[split].tolist()] for split in found}
            found["test"] += test
        sizes = ", ".join(f"{split} {len(files):,}" for split, files in found.items())
        rest = f" {len(left_out):,} files are no images in class folders and left out, such as "
        log.info(
            "data.path=%s: %s images.%s", self.path, sizes,
            f"{rest}{min(left_out)}." if left_out else "",
        )  # fmt: skip
        return found

    def _split_folders(self) -> dict[str, Path]:
        """Return the folders of train, val and test; none if the class folders lie in the path
        itself.

        Raises ConfigError for two folders of one split.
        """
        sources.check_class_folders(self.path)
        found: dict[str, Path] = {}
        for name in _folders(self.path):
            if (split := SPLIT_FOLDERS.get(name.lower().removesuffix("_set"))) is None:
                continue
            if split in found:
                raise ConfigError(
                    f"data.path={self.path}: both {found[split].name} and {name} are names of "
                    f"the {split} split. Put their images into one folder, or rename one."
                )
            found[split] = self.path / name
        if self.saved is None:
            return found if "train" in found else {}
        return {} if any(self.knows([folder.name]) for folder in found.values()) else found

    @cached_property
    def _to_predict(self) -> list[tuple[Path, int | None]]:
        """All images below the path, of its test or val folder if it has one: with classes if all
        are known.
        """
        folders = self._split_folders()
        folder = next((folders[s] for s in ("test", "val", "train") if s in folders), self.path)
        every, _ = _images(folder)
        if not every:
            raise ConfigError(f"data.path={folder}: there are no images below it ({_KINDS}).")
        names = [file.relative_to(folder).parts[0] for file in every]
        numbers = self.numbers(names, where="") if self.knows(names) else [None] * len(every)
        return list(zip(every, numbers, strict=True))


_KINDS = ", ".join(sorted(SUFFIXES))


def _is_shown(path: Path) -> bool:
    return path.name[0] != "."


def _folders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, except hidden ones, in the classes' order."""
    return ordered(p.name for p in folder.iterdir() if p.is_dir() and _is_shown(p))


def _images(root: Path) -> tuple[list[Path], list[Path]]:
    """Return the files with an image's suffix below a folder, except hidden ones, and the others.

    Links are followed, but to no folder that holds the root, nor to one a second time: they would
    never end. Raises ConfigError for a link to what is not there.
    """
    found: list[Path] = []
    others: list[Path] = []
    visited = {root.resolve(), *root.resolve().parents}
    for folder, folders, names in os.walk(root, followlinks=True):
        below = [Path(folder, name) for name in folders]
        folders.clear()
        # links last, so that a folder has its own name where a link leads to it as well
        for path in sorted(below, key=lambda path: (path.is_symlink(), path.name)):
            if _is_shown(path) and path.resolve() not in visited:
                visited.add(path.resolve())
                folders.append(path.name)
        for path in filter(_is_shown, (Path(folder, name) for name in names)):
            if path.suffix.lower() in SUFFIXES:
                found.append(path)
            elif path.exists():
                others.append(path)
            else:
                raise ConfigError(f"data.path: {path} is a link to what is not there. Remove it.")
    return sorted(found), others
