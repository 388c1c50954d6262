"""Tokenised splits kept on disk, so that a large data set is read and tokenised once.

A split is kept if its text is large (`LEAST_BYTES`), in a folder named after all that its tokens depend on: the
settings of the data, its files with their sizes and times, the tokenizer and the limits. JAXRLHF_DATA_CACHE is where,
instead of `jaxrlhf/data` under XDG_CACHE_HOME or `~/.cache`; `false` keeps nothing. Folders may be deleted at any time.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrlhf.config import DataSet, to_json
from jaxrlhf.config.sources import HubFiles, RecordFiles
from jaxrlhf.data.hub import identity
from jaxrlhf.runtime.cache_folder import cache_folder

LEAST_BYTES = 16 * 2**20
"""Size of a split's text, together, from which it is kept."""

_PACKED = 8
"""Bytes of text in a byte of a compressed file, roughly."""

_VERSION = 7


def folder_of(
    sources: list[tuple[DataSet, Any]], split: str, tokenizer: PreTrainedTokenizerBase, further: Any
) -> Path | None:
    """The folder that a split is kept in; None if it is not.

    Args:
      sources: Data sets, each with what else its prompts depend on.
      further: What all depends on besides, as JSON takes it.
    """
    place, backend = _place(), getattr(tokenizer, "backend_tokenizer", None)
    if place is None or backend is None:
        return None
    files = [identity(data, split) for data, _ in sources if isinstance(data, HubFiles | RecordFiles)]
    if len(files) < len(sources):  # some are read from no files
        return None
    if sum(_text_bytes(name, size) for of_source in files for name, size, _ in of_source) < LEAST_BYTES:
        return None
    described = [to_json(data) for data, _ in sources], [own for _, own in sources], files, split, further
    words = tokenizer.special_tokens_map, tokenizer.chat_template, type(tokenizer).__name__, _VERSION
    text = json.dumps([described, words, backend.to_str()], default=str)
    return place / hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _text_bytes(name: str, size: int) -> int:
    return size if name.endswith((".jsonl", ".ndjson", ".json")) else size * _PACKED


def _place() -> Path | None:
    """The folder of all that is kept."""
    given = os.environ.get("JAXRLHF_DATA_CACHE")
    if given is not None:
        return None if given.lower() in ("", "false", "0") else Path(given).expanduser()
    caches = cache_folder()
    return None if caches is None else caches / "data"


@contextmanager
def new_folder(folder: Path) -> Iterator[Path | None]:
    """A folder to write to, that takes its place once the block is over; None if nothing can be written there."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    except OSError:  # the data is then tokenised in memory, as small files are
        yield None
        return
    try:
        yield made
        if not folder.exists():  # another run may have been as quick
            os.replace(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
