"""Conversion of pictures of any mode to the form that policies see: upright, on white, 8 bits per color.

PIL and NumPy are only imported when there is a picture, because environment processes import this module.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_WHITE = (255, 255, 255, 255)
_PREMULTIPLIED = {"La": "LA", "RGBa": "RGBA"}
_MOST = 255
_SIXTEEN_BITS = 65535

FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM")
"""Formats that are read. PIL knows others that start programs, such as EPS, or that nobody uses for photographs."""

MOST_PIXELS = 1 << 26
"""Largest number of pixels of a picture; a small file may claim billions."""


def opened_rgb(content: bytes) -> Any:
    """Open an encoded picture of one of the `FORMATS`, converted by `upright_rgb`.

    Raises:
      ValueError: The picture has too many pixels, or values of unknown range.
      OSError: The content is damaged, or of another format (`PIL.UnidentifiedImageError`).
    """
    with _header(content) as picture:
        return upright_rgb(picture)


def pixels_of(content: bytes) -> int:
    """Return the number of pixels that the header of an encoded picture names; raises the errors of `opened_rgb`."""
    with _header(content) as picture:
        return picture.width * picture.height


@contextmanager
def _header(content: bytes) -> Iterator[Any]:
    import PIL.Image

    PIL.Image.init()  # registers the formats
    known = [name for name in FORMATS if name in PIL.Image.OPEN]
    with PIL.Image.open(io.BytesIO(content), formats=known) as picture:
        if picture.width * picture.height > MOST_PIXELS:
            raise ValueError(f"the image has {picture.width} x {picture.height} pixels, more than {MOST_PIXELS}")
        yield picture


def upright_rgb(picture: Any) -> Any:
    """Return a PIL picture in mode RGB, rotated by its EXIF data and composited on white where it is transparent.

    16-bit integers are scaled to 8 bits by their range, as are floats from 0 to 1. Other values from 0 to 255 are kept.

    Raises:
      ValueError: Other values, whose range is unknown.
    """
    import PIL.Image
    import PIL.ImageOps

    picture.load()  # PNG may have its EXIF data after its pixels
    picture = PIL.ImageOps.exif_transpose(picture)
    if picture.mode[:1] in "IF":
        return _grey(picture)
    if picture.mode in _PREMULTIPLIED:
        picture = picture.convert(_PREMULTIPLIED[picture.mode])
    if "A" in picture.getbands() or picture.info.get("transparency") is not None:
        over = picture.convert("RGBA")
        picture = PIL.Image.alpha_composite(PIL.Image.new("RGBA", over.size, _WHITE), over)
    return picture.convert("RGB")


def _grey(picture: Any) -> Any:
    """Convert a picture with one channel of more than 8 bits to mode RGB."""
    import numpy as np
    import PIL.Image

    pixels = np.asarray(picture)
    # Older versions of PIL read a 16-bit PNG into 32 bits.
    if picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format == "PNG"):
        scaled = pixels / _SIXTEEN_BITS * _MOST
    elif picture.mode == "F" and pixels.min() >= 0 and pixels.max() <= 1:
        scaled = pixels * _MOST
    elif pixels.min() >= 0 and pixels.max() <= _MOST:
        scaled = pixels
    else:
        raise ValueError(
            f"pixel values of mode {picture.mode} are from {pixels.min():g} to {pixels.max():g}, and the value of "
            "white is unknown; scale them to 0 to 255"
        )
    levels = np.round(scaled).astype(np.uint8)
    clear = picture.info.get("transparency")
    if isinstance(clear, int):
        levels = np.where(pixels == clear, np.uint8(_MOST), levels)
    return PIL.Image.fromarray(levels).convert("RGB")
