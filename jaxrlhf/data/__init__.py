"""Problems: where they come from, how they become tokens, and in which order they are used.

What needs transformers is resolved on first use.
"""

import importlib

from jaxrlhf.data.arithmetic import arithmetic_records
from jaxrlhf.data.loader import Loader

_LAZY = {
    "Loaded": "jaxrlhf.data.sources",
    "build_embedded_tokenizer": "jaxrlhf.data.tokenizer",
    "decoder": "jaxrlhf.data.tokenizer",
    "embedded_tokenizer": "jaxrlhf.data.tokenizer",
    "load_problems": "jaxrlhf.data.sources",
    "load_tokenizer": "jaxrlhf.data.tokenizer",
    "misread": "jaxrlhf.data.tokenizer",
}

__all__ = [
    "Loaded",
    "Loader",
    "arithmetic_records",
    "build_embedded_tokenizer",
    "decoder",
    "embedded_tokenizer",
    "load_problems",
    "load_tokenizer",
    "misread",
]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'jaxrlhf.data' has no attribute {name!r}")
