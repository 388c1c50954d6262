"""Cache of tokenized splits on disk, so that a large data set is read and tokenized once.

A split is cached if its text is large (`LEAST_BYTES`). Its folder is named by a hash of all that its tokens depend on:
the settings of the data, its files with their sizes and times, the tokenizer and the limits. Its files have checksums,
which are compared before they are read. JAXRLHF_DATA_CACHE is the cache's folder, instead of `jaxrlhf/data` under
XDG_CACHE_HOME or `~/.cache`; `false` disables the cache. Folders may be deleted at any time.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrlhf.config import DataSet, Refusal, to_json
from jaxrlhf.config.sources import HubFiles, RecordFiles
from jaxrlhf.data.hub import identity
from jaxrlhf.runtime.cache_folder import cache_folder
from jaxrlhf.runtime.checksums import damage_of, write_checksums

LEAST_BYTES = 16 * 2**20
"""Minimum total size of the text of a split that is cached."""

_COMPRESSION = 8
"""Approximate bytes of text in one byte of a compressed file."""

_VERSION = 10

logger = logging.getLogger(__name__)


def cache_folder_of(
    sources: list[tuple[DataSet, Any]], split: str, tokenizer: PreTrainedTokenizerBase, further: Any
) -> Path | None:
    """Return the cache folder of a split; None if the split is not cached.

    Args:
      sources: Data sets, each with the other values that its prompts depend on.
      further: Further JSON-compatible values that all tokens depend on.
    """
    place, backend = _place(), getattr(tokenizer, "backend_tokenizer", None)
    if place is None or backend is None:
        return None
    files = [identity(data, split) for data, _ in sources if isinstance(data, HubFiles | RecordFiles)]
    if len(files) < len(sources):  # some data sets are not read from files
        return None
    if sum(_text_bytes(name, size) for of_source in files for name, size, _ in of_source) < LEAST_BYTES:
        return None
    described = [to_json(data) for data, _ in sources], [own for _, own in sources], files, split, further
    words = tokenizer.special_tokens_map, tokenizer.chat_template, type(tokenizer).__name__, _VERSION
    text = json.dumps([described, words, backend.to_str()], default=str)
    return place / hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _text_bytes(name: str, size: int) -> int:
    return size if name.endswith((".jsonl", ".ndjson", ".json", ".csv", ".tsv")) else size * _COMPRESSION


def _place() -> Path | None:
    """Return the folder of the whole cache; None if there is none."""
    given = os.environ.get("JAXRLHF_DATA_CACHE")
    if given is not None:
        return None if given.lower() in ("", "false", "0") else Path(given).expanduser()
    caches = cache_folder()
    return None if caches is None else caches / "data"


def is_cached(folder: Path) -> bool:
    """Return True if a folder is there as it was written; a damaged one is removed.

    Raises:
      Refusal: A damaged folder cannot be removed.
    """
    if not os.path.lexists(folder):  # Path.exists raises if a parent folder is not readable
        return False
    if (damage := damage_of(folder, checked=True)) is None:
        return True
    logger.warning("the data cache is damaged: %s; the data is read and tokenized again", damage)
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise Refusal(f"the data cache is damaged: {damage}; delete {folder}, which failed here ({error})") from error
    return False


@contextmanager
def new_folder(folder: Path) -> Iterator[Path | None]:
    """Yield a new folder to write to, renamed to `folder` after the block; None if nothing can be written there."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    except OSError:  # the tokens are then kept in memory, as for small files
        yield None
        return
    try:
        yield made
        write_checksums(made)
        if not folder.exists():  # another run may have been faster
            os.replace(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
