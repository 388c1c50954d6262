"""jaxrlhf: reinforcement learning from human and verifiable feedback, in JAX.

Importing this package touches no device and loads nothing heavy; its names are resolved on first use.
"""

import importlib
from typing import TYPE_CHECKING

import jaxrlhf.runtime.environment
from jaxrlhf.version import __version__

if TYPE_CHECKING:
    from jaxrlhf.config import Config, load, override
    from jaxrlhf.trainer.run import run

_LAZY = {
    "Config": "jaxrlhf.config",
    "load": "jaxrlhf.config",
    "override": "jaxrlhf.config",
    "run": "jaxrlhf.trainer.run",
}

__all__ = ["Config", "__version__", "load", "override", "run"]


def __dir__():
    return [*globals(), *_LAZY]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'jaxrlhf' has no attribute {name!r}")
