"""The folder of what is kept between runs: compiled programs, and data that was tokenised."""

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """`jaxrlhf` under XDG_CACHE_HOME or `~/.cache`; None for a user without a home, as containers have them."""
    cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return None if cache.startswith("~") else Path(cache, "jaxrlhf").absolute()
