"""Fingerprint of a model checkpoint, independent of its location: config.json and samples of each weight file."""

import hashlib
from pathlib import Path

from jaxrlhf.checkpoint.pretrained import WEIGHTS
from jaxrlhf.models.huggingface.gguf_folder import LINK
from jaxrlhf.models.huggingface.hub import resolve

BLOCKS, BLOCK_BYTES = 1024, 4096


def identity(path: str | Path, *, fetch: bool = False) -> dict[str, str] | None:
    """Return a digest of each file that determines a model's outputs; None if the weights are not on this machine.

    A digest covers the file size and about 1024 blocks of 4096 bytes. It takes moments, and detects a change of any
    tensor that takes up a thousandth of its file.

    Args:
      path: Directory of a checkpoint, converted or not, or a hub id.
      fetch: True downloads the weights of a hub id first.
    """
    directory = resolve(path, weights=fetch)
    weights = sorted([*directory.glob("model*.safetensors"), *directory.glob(LINK), *(directory / WEIGHTS).rglob("*")])
    files = [file for file in (directory / "config.json", *weights) if file.is_file()]
    return {file.relative_to(directory).as_posix(): _digest(file) for file in files} if weights else None


def _digest(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(file, "rb") as content:
        for start in range(0, size, max(BLOCK_BYTES, size // BLOCKS)):
            content.seek(start)
            digest.update(content.read(BLOCK_BYTES))
    return digest.hexdigest()
