"""Images as Pillow opens them, as numbers that are the brightness they show. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armature.errors import ConfigError

MODES = ("L", "RGB", "RGBA")  # Pillow's modes whose numbers are brightness in 8 bits


def common_mode(images: Sequence[Any]) -> str:
    """Return the mode that all are read in: L if all show grey, RGBA if all have it, else RGB."""
    if images and all(image.mode == "RGBA" for image in images):
        return "RGBA"
    return "L" if images and all(_is_shown(image, "L") for image in images) else "RGB"


@dataclass(frozen=True)
class Reader:
    """Turns images into pixels of one mode.

    Attributes:
        mode: L, RGB or RGBA.
        typed: whether the user named it. Else an image that shows more than the mode can is
            refused.
    """

    mode: str
    typed: bool

    def __call__(self, image: Any, *, where: str) -> NDArray[np.uint8]:
        """Return pixels (C, H, W). Raises ConfigError."""
        if image.mode.startswith(("I", "F")):
            raise ConfigError(
                f"{where} has Pillow's mode {image.mode}, whose pixels have more than 8 bits. "
                "Convert the images to 8 bits."
            )
        if not self.typed and not _is_shown(image, self.mode):
            shows = "transparency" if not _is_opaque(image) else "colors"
            raise ConfigError(
                f"{where} has Pillow's mode {image.mode} and shows {shows}, while the images "
                f"looked at before are read as {self.mode}. Type data.image_mode=RGB (or RGBA: "
                "with transparency; L: grey) for all."
            )
        try:
            pixels = np.array(image.convert(self.mode))
        except ValueError as error:  # a mode that Pillow does not convert, such as LAB
            raise ConfigError(
                f"{where} has Pillow's mode {image.mode} ({error}). Convert it to RGB."
            ) from error
        return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy()


def _is_shown(image: Any, mode: str) -> bool:
    """Return whether an image of this mode shows all that the image shows."""
    return mode == "RGBA" or (_is_opaque(image) and (mode == "RGB" or _is_grey(image)))


def _is_opaque(image: Any) -> bool:
    if not image.has_transparency_data:
        return True
    return image.convert("RGBA").getchannel("A").getextrema()[0] == 255


def _is_grey(image: Any) -> bool:
    if image.mode in ("1", "L", "LA", "La"):
        return True
    if image.mode not in ("P", "PA"):
        return False
    colors = np.asarray(image.convert("RGB"))
    return bool((colors == colors[..., :1]).all())
