"""Cache folder, kept between runs: compiled programs and tokenized data."""

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """Return `jaxrlhf` under XDG_CACHE_HOME or `~/.cache`; None for a user without a home (common in containers)."""
    cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return None if cache.startswith("~") else Path(cache, "jaxrlhf").absolute()
