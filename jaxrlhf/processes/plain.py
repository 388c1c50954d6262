"""Safe unpickling of messages from processes that run user code: no user code runs while reading."""

import io
import pickle
from dataclasses import is_dataclass
from typing import Any

ALLOWED_MODULES = ("jaxrlhf.episode", "jaxrlhf.processes.forking", "jaxrlhf.environments.protocol")
"""Modules whose dataclasses a message may contain, in addition to built-in types."""


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module in ALLOWED_MODULES else None
        if not (isinstance(found, type) and is_dataclass(found) and found.__module__ == module):
            raise pickle.UnpicklingError(f"a message holds a {module}.{name}")
        return found


def loads(message: bytes) -> Any:
    """Unpickle a message.

    Raises:
      pickle.UnpicklingError: The message holds types other than built-in types and message dataclasses. Corrupt bytes
        may raise other errors.
    """
    return _Plain(io.BytesIO(message)).load()
