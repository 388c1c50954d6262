"""Checkpoint item of an off-policy schedule, a pickle: collected responses, or groups in flight."""

import dataclasses
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import reason_of

QUEUE = "queue"
"""Name of the item, and of its folder in a checkpoint."""

_FILE = "collected.pickle"


class QueueItem:
    """Checkpoint item stored as a pickle. Restored arrays may have any shape.

    A pickle can run code: resume only from checkpoints of runs that you trust, as you would with their configurations.

    Args:
      get: Returns the value to save; futures in the value are waited for.
      put: Takes the restored value.
    """

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self._get, self._put = get, put

    def describe(self) -> dict[str, str]:
        return {}

    def save(self, directory: Path) -> None:
        (directory / _FILE).write_bytes(pickle.dumps(settled(self._get())))

    def finish(self) -> None:
        """Do nothing: `save` has written everything."""

    def merge(self) -> None:
        """Do nothing: one process wrote the whole file."""

    def restore(self, directory: Path) -> None:
        """Load the saved value and pass it to `put`.

        Raises:
          Refusal: Classes in the pickle have changed, with the package's version or in an algorithm's file.
        """
        try:
            saved = pickle.loads((directory / _FILE).read_bytes())
            check_fields(saved)
        except (AttributeError, ImportError, TypeError) as error:
            raise Refusal(
                f"{directory}: queued responses were saved by a different version of the code ({reason_of(error)}); "
                "resume with the original version and algorithm file, or choose another workdir"
            ) from error
        self._put(saved)


def check_fields(value: Any) -> None:
    """Raise `AttributeError` if a dataclass in a value, or in its lists, tuples and fields, lacks a field."""
    if isinstance(value, list | tuple):
        for part in value:
            check_fields(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            check_fields(getattr(value, field.name))


def settled(value: Any) -> Any:
    """Replace futures by their results, also within lists, tuples and fields of dataclasses."""
    if isinstance(value, Future):
        return settled(value.result())
    if type(value) in (list, tuple):  # not a named tuple
        return type(value)(map(settled, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **{name: settled(field) for name, field in fields.items()})
    return value
