"""Checkpoint directory for a GGUF file: config.json, tokenizer, and a link to the file in place of weights."""

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from functools import cache
from pathlib import Path

from jaxrlhf.models.huggingface.gguf_header import config_fields, read_header
from jaxrlhf.models.huggingface.gguf_tokenizer import doubt_of, read_tokenizer
from jaxrlhf.runtime.cache_folder import cache_folder

LINK = "model.gguf"
"""Link in the directory to the GGUF file."""
SUFFIX = ".gguf"
_NOTICE = "notice"
"""File with a warning that is repeated whenever the directory is used."""
_VERSION = 2
"""Version of the directory's contents; increase it when the code writes other contents."""


def as_directory(file: Path) -> Path:
    """Return the directory that describes a GGUF file, kept in the cache folder until the file changes.

    Raises:
      Refusal: The file is no GGUF file, is damaged or truncated, or holds a model that is not supported.
    """
    file, status = file.absolute(), file.stat()
    facts = f"{file} {status.st_size} {status.st_mtime_ns} {_VERSION}"
    folder = _place() / f"{file.stem}-{hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()}"
    if not (folder / "config.json").is_file():
        _describe(file, folder)
    if (folder / _NOTICE).is_file():
        warnings.warn((folder / _NOTICE).read_text(), RuntimeWarning, stacklevel=2)
    return folder


def _describe(file: Path, folder: Path) -> None:
    """Write the directory of a file; the directory gets its name when it is complete."""
    header = read_header(file)
    fields, tokenizer, doubt = config_fields(header), read_tokenizer(header), doubt_of(header)
    made = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        tokenizer.save_pretrained(made)
        (made / LINK).symlink_to(file)
        if doubt is not None:
            (made / _NOTICE).write_text(doubt)
        (made / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
        _move(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _move(made: Path, folder: Path) -> None:
    """Give a directory its name, unless another process was faster; an incomplete directory is replaced."""
    try:
        os.replace(made, folder)
    except OSError:  # a directory of that name exists
        if not (folder / "config.json").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(made, folder)


@cache
def _place() -> Path:
    """Return the folder of all descriptions; a temporary folder if there is no writable cache folder."""
    caches = cache_folder()
    if caches is not None:
        try:
            (caches / "gguf").mkdir(parents=True, exist_ok=True)
        except OSError:
            caches = None
    if caches is not None and os.access(caches / "gguf", os.W_OK):
        return caches / "gguf"
    return Path(tempfile.mkdtemp(prefix="jaxrlhf_gguf_"))
