"""Pictures of any kind as policies see them: upright, on white, in eight bits a colour.

It imports neither PIL nor NumPy before a picture is there, because processes of environments import it.
"""

from typing import Any

_WHITE = (255, 255, 255, 255)
_PREMULTIPLIED = {"La": "LA", "RGBa": "RGBA"}
_MOST = 255
_SIXTEEN_BITS = 65535


def upright_rgb(picture: Any) -> Any:
    """A picture of PIL in the mode RGB: turned as its EXIF data say, over white where it is transparent.

    Integers of 16 bits become eight by their range, and so do floats from 0 to 1. Other numbers from 0 to 255 are taken
    as they are.

    Raises:
      ValueError: Other numbers, whose range is not known.
    """
    import PIL.Image
    import PIL.ImageOps

    picture.load()  # PNG may have its EXIF data behind its pixels
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
    """A picture of one number a pixel, wider than eight bits, in the mode RGB."""
    import numpy as np
    import PIL.Image

    pixels = np.asarray(picture)
    # Older versions of PIL read a PNG of 16 bits into 32.
    if picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format == "PNG"):
        scaled = pixels / _SIXTEEN_BITS * _MOST
    elif picture.mode == "F" and pixels.min() >= 0 and pixels.max() <= 1:
        scaled = pixels * _MOST
    elif pixels.min() >= 0 and pixels.max() <= _MOST:
        scaled = pixels
    else:
        raise ValueError(
            f"its numbers, of the mode {picture.mode}, are {pixels.min():g} to {pixels.max():g}, and nothing says "
            "which one is white; scale them to 0 to 255"
        )
    levels = np.round(scaled).astype(np.uint8)
    clear = picture.info.get("transparency")
    if isinstance(clear, int):
        levels = np.where(pixels == clear, np.uint8(_MOST), levels)
    return PIL.Image.fromarray(levels).convert("RGB")
