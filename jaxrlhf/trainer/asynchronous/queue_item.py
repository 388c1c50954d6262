"""Responses that wait to be learnt from, as an item of a checkpoint."""

import dataclasses
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import reason_of

QUEUE = "queue"
"""Name of the item, and so of its folder in a checkpoint."""

_FILE = "collected.pickle"


class QueueItem:
    """Responses that were collected and not learnt from yet. No array in it has to fit one that is restored.

    It is a pickle, so go on from checkpoints of runs that you trust, as you would from their configurations.

    Args:
      get: Gives all there is to save; futures in it are waited for.
      put: Takes over what was saved.
    """

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self._get, self._put = get, put

    def describe(self) -> dict[str, str]:
        return {}

    def save(self, directory: Path) -> None:
        (directory / _FILE).write_bytes(pickle.dumps(settled(self._get())))

    def finish(self) -> None:
        """Nothing is left to write."""

    def merge(self) -> None:
        """One process wrote it whole."""

    def restore(self, directory: Path) -> None:
        """Take over what was saved.

        Raises:
          Refusal: Its classes are others now: those of another version, or of an algorithm's file that has changed.
        """
        try:
            saved = pickle.loads((directory / _FILE).read_bytes())
        except (AttributeError, ImportError, TypeError) as error:
            raise Refusal(
                f"{directory}: responses that waited to be learnt from were saved by other code ({reason_of(error)}); "
                "go on with the version and the algorithm's file that saved them, or choose another workdir"
            ) from error
        self._put(saved)


def settled(value: Any) -> Any:
    """A value whose futures, in lists and in fields of dataclasses, are replaced by their results."""
    if isinstance(value, Future):
        return settled(value.result())
    if type(value) in (list, tuple):  # and not what is a tuple with names
        return type(value)(map(settled, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **{name: settled(field) for name, field in fields.items()})
    return value
