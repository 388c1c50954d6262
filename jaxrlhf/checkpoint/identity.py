"""Fingerprint of a checkpoint, wherever it lies: its config.json and a little of each file of its weights."""

import hashlib
from pathlib import Path

from jaxrlhf.checkpoint.pretrained import WEIGHTS
from jaxrlhf.models.huggingface.gguf_folder import LINK
from jaxrlhf.models.huggingface.hub import resolve

PLACES, PLACE_BYTES = 1024, 4096


def identity(path: str | Path, *, fetch: bool = False) -> dict[str, str] | None:
    """A digest of each file that decides what a model computes; None if the weights are not on this machine.

    Of a file it takes the size and what stands at 1024 places, so it costs moments, and sees a change of any tensor
    that takes a thousandth of its file.

    Args:
      path: Directory of a checkpoint, converted or not, or a hub id.
      fetch: Download the weights of a hub id first.
    """
    directory = resolve(path, weights=fetch)
    weights = sorted([*directory.glob("model*.safetensors"), *directory.glob(LINK), *(directory / WEIGHTS).rglob("*")])
    files = [file for file in (directory / "config.json", *weights) if file.is_file()]
    return {file.relative_to(directory).as_posix(): _digest(file) for file in files} if weights else None


def _digest(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(file, "rb") as content:
        for place in range(0, size, max(PLACE_BYTES, size // PLACES)):
            content.seek(place)
            digest.update(content.read(PLACE_BYTES))
    return digest.hexdigest()
