"""Images of records: references, pixels from a checkpoint's image processor, and positions in a prompt.

A prompt carries images by reference. Each process that computes with an image opens and preprocesses the image itself,
so that no pixels are sent with prompts. Images of episodes are stored in the process that showed them.
"""

import base64
import binascii
import hashlib
import io
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from jaxrlhf.batch import Image
from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import reason_of
from jaxrlhf.data.chats.parts import named_images, unpacked
from jaxrlhf.data.records import field_of, record_at
from jaxrlhf.data.shapes import PICTURE, draw_shapes
from jaxrlhf.episode import ShownImage
from jaxrlhf.pictures import FORMATS, MOST_PIXELS, opened_rgb, pixels_of
from jaxrlhf.runtime.checksums import is_special

MARK = "<image>"
"""Text in a prompt that stands for the next image of its record."""

_UNQUOTED = "".join(map(chr, range(32, 127))).replace("#", "").replace("%", "")
"""Characters of a field name that are not quoted in a reference."""

_KEPT_BYTES = 4 << 30
"""Maximum bytes of patches that an image reader caches; the least recently used patches are dropped."""


@dataclass(frozen=True)
class Placeholders:
    """Text of an image in a prompt, before and after its number of features is known.

    Attributes:
      mark: Text that chat templates write once for each image; begin and end tokens may surround it.
      enclosed: Mark with begin and end tokens, for chat templates that take no images.
      expanded: Function from the number of features to the text that replaces `mark` before tokenization.
      token: Token id that stands for one feature.
    """

    mark: str
    enclosed: str
    expanded: Callable[[int], str]
    token: int


@dataclass(eq=False)
class ImageReader:
    """Reader of images by reference, with the image processor of a checkpoint.

    Attributes:
      patch_size: Side of a patch in pixels.
      merge: Side, in patches, of the square that becomes one feature.
    """

    processor: Any
    placeholders: Placeholders
    patch_size: int
    merge: int
    _patches: dict[str, np.ndarray] = field(default_factory=dict)
    _bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _grids: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)

    def refer(self, source: Hashable, *, place: str) -> Image:
        """Return a reference to an image that has no position in a prompt yet; its start is 0.

        Raises:
          Refusal: The image is missing or damaged.
        """
        if isinstance(source, str) and source.startswith("data:"):
            source = ShownImage.of(source)
        if str(source).startswith("shapes:"):  # the name determines the pixels
            size, content = PICTURE, str(source).encode()
        else:
            image = opened(source, place=place)
            size, content = image.size, f"{image.size}".encode() + image.tobytes()
        digest, grid = hashlib.blake2b(content, digest_size=16).hexdigest(), self._grid(size, place=place)
        return Image(source, digest, grid, 0, int(np.prod(grid)) // self.merge**2)

    def patches(self, image: Image) -> np.ndarray:
        """Return the `[Q, C]` patches of an image; the patches of one feature are consecutive."""
        found = self._patches.get(image.digest)
        if found is None:
            found, grid = self._processed(opened(image.source, place=f"{image.source:.60}"))
            if grid != image.grid:
                raise Refusal(
                    f"{image.source:.60}: {grid} patches, and {image.grid} when prompts were made; the image has "
                    "changed, so read the data again"
                )
        self._keep(image.digest, found)
        return found

    def png_url(self, image: Image) -> str:
        """Return an image as a data URL, in the size that its patches have.

        Another program with the same image processor does not resize it, so its pixels are those of `patches`.
        """
        picture, (_, rows, columns) = opened(image.source, place=f"{image.source:.60}"), image.grid
        if picture.size != (size := (columns * self.patch_size, rows * self.patch_size)):
            picture = picture.resize(size, self.processor.resample)
        written = io.BytesIO()
        picture.save(written, "PNG", compress_level=1)
        return data_url(written.getvalue())

    def _keep(self, digest: str, patches: np.ndarray) -> None:
        """Cache patches as the most recently used ones."""
        with self._lock:  # an engine and a trainer may read images concurrently
            if self._patches.pop(digest, None) is None:
                self._bytes += patches.nbytes
            self._patches[digest] = patches
            while self._bytes > _KEPT_BYTES and len(self._patches) > 1:
                self._bytes -= self._patches.pop(next(iter(self._patches))).nbytes

    def _grid(self, size: tuple[int, int], *, place: str) -> tuple[int, int, int]:
        """Return the numbers of frames, rows and columns of patches of an image of this width and height."""
        import PIL.Image

        if size not in self._grids:
            try:
                _, self._grids[size] = self._processed(PIL.Image.new("RGB", size))
            except (ValueError, ZeroDivisionError) as error:
                raise Refusal(
                    f"{place}: the image of {size[0]} x {size[1]} pixels is refused ({reason_of(error)}); make it "
                    "larger or less long, or leave the record out"
                ) from error
        return self._grids[size]

    def _processed(self, image: Any) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Return the `[Q, C]` patches of an image, and their numbers of frames, rows and columns."""
        batch = self.processor(images=[image], return_tensors="np")
        pixels = np.asarray(batch["pixel_values"], np.float32)
        if "image_grid_thw" in batch:
            frames, rows, columns = map(int, batch["image_grid_thw"][0])
            return pixels, (frames, rows, columns)
        channels, height, width = pixels.shape[1:]  # resized to one size, but not split into patches yet
        side, merge = self.patch_size, self.merge
        shape = channels, height // side // merge, merge, side, width // side // merge, merge, side
        patches = pixels[0].reshape(shape).transpose(1, 4, 2, 5, 0, 3, 6)
        return patches.reshape(-1, channels * side**2), (1, height // side, width // side)


def opened(source: Hashable, *, place: str) -> Any:
    """Open an image by reference, converted by `upright_rgb`.

    Args:
      source: `file:PATH`, `record:PATH#NUMBER/KEY/INDEX`, `shapes:...`, a data URL, or an image that an episode shows.
      place: Origin of the reference, for error messages.

    Raises:
      Refusal: The image is missing or damaged.
    """
    source = source.load() if isinstance(source, ShownImage) else str(source)
    kind, _, rest = source.partition(":")
    if kind == "shapes":
        return draw_shapes(rest)
    content: Any = Path(rest)
    if kind == "data":
        content = _content(source, Path(), place=place)
    elif kind == "record":
        content = _of_record(rest, place=place)
    if isinstance(content, Path) and is_special(content):
        raise Refusal(f"{place}: {content} is no regular file; leave the record out")
    with _refused(place, content):
        return opened_rgb(content.read_bytes() if isinstance(content, Path) else content)


def check_pixels(urls: Sequence[str], *, place: str) -> None:
    """Refuse images with more pixels together than one image may have; only the headers are read.

    Args:
      urls: Data URLs.

    Raises:
      Refusal: There are too many pixels, or an image is damaged.
    """
    total = 0
    for url in urls:
        content = _content(url, Path(), place=place)
        assert isinstance(content, bytes), "a data URL contains its image"
        with _refused(place, content):
            total += pixels_of(content)
    if total > MOST_PIXELS:
        raise Refusal(f"{place}: the images have {total} pixels together, more than {MOST_PIXELS}; send smaller ones")


@contextmanager
def _refused(place: str, content: Any) -> Iterator[None]:
    """Turn any error of the block into a `Refusal`: damage makes libraries raise errors of many classes."""
    import PIL.Image

    try:
        yield
    except FileNotFoundError as error:
        raise Refusal(f"{place}: there is no image {error.filename}; check the path") from error
    except Exception as error:
        unknown = isinstance(error, PIL.UnidentifiedImageError)  # its message is a memory address
        reason = f"of none of the formats {', '.join(FORMATS)}" if unknown else reason_of(error)
        raise Refusal(f"{place}: the image is damaged or no image ({reason}); leave the record out") from error


def source_of(value: Any, record: str, path: Path) -> str:
    """Return the reference to an image of a record: its file if the record names one, else its place in the record.

    Args:
      record: Place of the image, `PATH#NUMBER/KEY/INDEX`.
      path: Record file; relative image paths resolve against its folder.
    """
    named = unpacked(value)
    if isinstance(named, str) and named and not named.startswith("data:"):
        named = _path_of(named)
        if "://" not in named:
            return f"file:{path.parent / Path(named).expanduser()}"
    return f"record:{record}"


def record_place(record: str, key: str, index: int) -> str:
    """Return the place of an image: `PATH#NUMBER` of its record, the field's name with `#` quoted, and its index."""
    return f"{record}/{quote(key, safe=_UNQUOTED)}/{index}"


def _path_of(named: str) -> str:
    """Return the path of a `file://` URL; any other text is unchanged."""
    kind, mark, rest = named.partition("://")
    return unquote(rest.removeprefix("localhost")) if mark and kind.lower() == "file" else named


def portable(source: Hashable) -> str:
    """Return an image's value for use in any other record: a file's absolute path, or a data URL."""
    kind, _, rest = str(source).partition(":")
    if kind == "file":
        return str(Path(rest).absolute())
    content = _of_record(rest, place=str(source))
    return str(content.absolute()) if isinstance(content, Path) else data_url(content)


def data_url(content: bytes) -> str:
    """Return an encoded image as a data URL; it always says PNG, since readers detect the format by the content."""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def name_of(source: Hashable) -> str:
    """Return a short name of a reference for people: the file's name, or the record's place in its file."""
    kind, _, rest = str(source).partition(":")
    if kind == "record":
        path, _, where = rest.rpartition("#")
        return f"{Path(path).name}#{unquote(where)}"
    return Path(rest).name if kind == "file" else f"{kind}:{rest[:12]}" if kind == "shown" else rest


def image_values(value: Any) -> list[Any]:
    """Return the images of a field: one image, a list of images, or the images in parts of messages."""
    if value is None:
        return []
    values = [*value] if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
    if not values or not all(isinstance(one, Mapping) and "role" in one for one in values):
        return values
    return named_images(values)


def _of_record(where: str, *, place: str) -> bytes | Path:
    """Return the encoded bytes of the image at `PATH#NUMBER/KEY/INDEX`, or its file."""
    path, _, inside = where.rpartition("#")
    number, field = inside.split("/", 1)
    key, _, index = field.rpartition("/")
    values = image_values(field_of(record_at(path, int(number)), unquote(key)))
    if int(index) >= len(values):
        raise Refusal(f"{place}: the record has {len(values)} images now; {path} has changed, so read the data again")
    return _content(values[int(index)], Path(path).parent, place=place)


def _content(value: Any, directory: Path, *, place: str) -> bytes | Path:
    """Return the encoded bytes of an image in a record, or its file."""
    given, value = value, unpacked(value)
    if isinstance(value, bytes):
        return value
    if isinstance(value, str) and value.startswith("data:"):
        header, comma, encoded = value.partition(",")
        if comma and header.endswith(";base64"):
            try:
                return base64.b64decode("".join(encoded.split()), validate=True)
            except binascii.Error as error:
                raise Refusal(f"{place}: the data URL of an image is not base64 ({error})") from error
        raise Refusal(f"{place}: {header[:40]!r} starts no data URL of an image; expected data:image/...;base64,...")
    value = _path_of(value) if isinstance(value, str) else value
    if isinstance(value, str) and "://" in value:
        raise Refusal(f"{place}: {value!r:.60} is a URL, and nothing is fetched; save the image and name its file")
    if isinstance(value, str) and value:
        return directory / Path(value).expanduser()
    raise Refusal(f"{place}: an image must be bytes, a path or a data URL, got {given!r:.60}")


@lru_cache(maxsize=64)
def _opened_images(images: tuple[tuple[Hashable, str], ...]) -> tuple[Any, ...]:
    """Open images by reference; the digest is part of the cache key, because a file may be rewritten."""
    return tuple(opened(source, place=f"{source:.60}") for source, _ in images)


def with_pictures(record: Mapping[str, Any], images: Sequence[Image]) -> Mapping[str, Any]:
    """Return the record of a problem with its opened images under `images`, for reward functions."""
    named = tuple((image.source, image.digest) for image in images)
    return {**record, "images": [*_opened_images(named)]} if images else record


def placed(tokens: Sequence[int], images: Sequence[Image], token: int, *, place: str) -> tuple[Image, ...]:
    """Return the images with the positions of their placeholders in a tokenized prompt.

    Raises:
      Refusal: There are more or fewer placeholders than features.
    """
    (positions,) = np.nonzero(np.asarray(tokens) == token)
    total = sum(image.tokens for image in images)
    if len(positions) != total:
        raise Refusal(
            f"{place}: the prompt has {len(positions)} placeholders for {total} features of {len(images)} images; the "
            "text must not spell placeholders, and a chat template has to write one for each image"
        )
    starts = accumulate((image.tokens for image in images), initial=0)
    return tuple(replace(image, start=int(positions[n])) for image, n in zip(images, starts, strict=False))
