"""Images as Pillow opens them, as numbers that are the brightness they show. Torch-free."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armature.errors import ConfigError

MODES = ("L", "RGB", "RGBA")  # Pillow's modes whose numbers are brightness in 8 bits


@contextmanager
def readable(where: str) -> Iterator[None]:
    """Raise ConfigError for what Pillow cannot read, whose formats raise errors of many kinds."""
    from PIL import Image

    try:
        yield
    except (OSError, ValueError, SyntaxError, TypeError, Image.DecompressionBombError) as error:
        raise ConfigError(f"{where} cannot be read as an image ({error}). Remove it.") from error


def mode_of(image: Any) -> str:
    """Return the first of MODES that shows all that the image shows."""
    if image.has_transparency_data and image.convert("RGBA").getextrema()[3][0] < 255:
        return "RGBA"
    if image.mode in ("P", "PA"):
        colors = np.asarray(image.convert("RGB"))
        return "L" if (colors == colors[..., :1]).all() else "RGB"
    return "L" if image.mode in ("1", "L", "LA", "La") else "RGB"


def converted(image: Any, mode: str, *, where: str) -> Any:
    """Return the image in a mode. Raises ConfigError for pixels of more than 8 bits, which Pillow
    would clip.
    """
    said = f"{where} has Pillow's mode {image.mode}"
    if image.mode.startswith(("I", "F")):
        raise ConfigError(
            f"{said}, whose pixels have more than 8 bits. Convert the images to 8 bits."
        )
    try:
        return image.convert(mode)
    except ValueError as error:  # a mode that Pillow does not convert, such as LAB
        raise ConfigError(f"{said} ({error}). Convert it to RGB.") from error


def read(image: Any, mode: str, *, typed: bool, where: str) -> NDArray[np.uint8]:
    """Return pixels (C, H, W) in a mode, which the user may have typed.

    Raises ConfigError for an image that shows more than a mode that is not typed.
    """
    pixels = np.array(converted(image, mode, where=where))
    if not typed and MODES.index(mode_of(image)) > MODES.index(mode):
        raise ConfigError(
            f"{where} has Pillow's mode {image.mode}, which shows more than {mode}, the mode of "
            "the first image. Type data.image_mode=RGB for all (RGBA: with transparency; L: grey)."
        )
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy()
