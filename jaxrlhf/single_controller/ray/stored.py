"""Values that stay where they were computed, and travel from there to whoever loads them."""

import dataclasses
import threading
from dataclasses import dataclass
from typing import Any

from jaxrlhf.single_controller.ray.failure import HostDied, HostId


@dataclass(frozen=True)
class Stored:
    """A handle of what one host returned. The value is in the object store of the host's machine.

    Args of a call may hold it, alone or in lists and tuples: the receiving host loads the value from
    where it is. It lives as long as its host process and a handle do.

    Attributes:
      reference: Ray's object reference.
      nbytes: Of the array leaves.
      start_s: Wall clock on the host when the call began, as `time.time()`.
      end_s: When it ended.
    """

    reference: Any
    nbytes: int
    start_s: float
    end_s: float
    host: HostId
    label: str

    def load(self) -> Any:
        """The value. Its NumPy arrays are read-only.

        Raises:
          HostDied: If the value is lost with its host.
        """
        import ray

        try:
            value = ray.get(self.reference)
        except ray.exceptions.ObjectLostError as error:
            raise HostDied(self.host, self.label, "ended before its result was loaded") from error
        _LOADED.add(self.nbytes)
        return value


class _Counter:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.total = 0

    def add(self, count: int) -> None:
        with self._lock:
            self.total += count


_LOADED = _Counter()
_SENT = _Counter()


def loaded_bytes() -> int:
    """Bytes of array leaves that this process has loaded from handles so far."""
    return _LOADED.total


def sent_bytes() -> int:
    """Bytes of array leaves that this process has put into calls as arguments so far.

    What is behind a handle among the arguments does not count: this process does not send it.
    """
    return _SENT.total


def send(args: tuple[Any, ...]) -> Any:
    """Put arguments into the object store, once for all who will receive them."""
    import ray

    _SENT.add(array_bytes(args))
    return ray.put(args)


def receive(value: Any) -> Any:
    """`value` with each handle in it, alone or in lists and tuples, replaced by what it stands for."""
    if isinstance(value, Stored):
        return value.load()
    if type(value) in (list, tuple):
        return type(value)(receive(item) for item in value)
    return value


def array_bytes(value: Any) -> int:
    """Bytes of the arrays in nested dicts, sequences and dataclasses. A handle has none."""
    if isinstance(value, Stored):
        return 0
    if isinstance(value, dict):
        return sum(map(array_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(array_bytes, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return sum(array_bytes(getattr(value, field.name)) for field in dataclasses.fields(value))
    return getattr(value, "nbytes", 0)
