"""Handles of values in Ray's object store, which travel from there straight to whoever loads them."""

from dataclasses import dataclass
from typing import Any

from jaxrlhf.single_controller.ray.failure import HostDied, HostId


@dataclass(frozen=True)
class Stored:
    """Handle of a value that one host returned, in the object store of the host's machine.

    Arguments of a call may hold it, alone or in lists and tuples: the receiving host loads the value from
    where it is. It lives as long as its host process and a handle do.

    Attributes:
      reference: Ray's object reference.
      start_s: Wall clock on the host when the call began, as `time.time()`.
      end_s: Wall clock when it ended.
      rows: First dimension of all arrays of the value; None if they differ.
    """

    reference: Any
    start_s: float
    end_s: float
    host: HostId
    label: str
    rows: int | None = None

    def load(self) -> Any:
        """The value. Its NumPy arrays are read-only.

        Raises:
          HostDied: The value is lost with its host.
        """
        import ray

        try:
            return ray.get(self.reference)
        except ray.exceptions.ObjectLostError as error:
            raise HostDied(self.host, self.label, "ended before its result was loaded") from error


def loaded(value: Any) -> Any:
    """A value with each handle in it, alone or in lists and tuples, replaced by the handle's value."""
    if isinstance(value, Stored):
        return value.load()
    if type(value) in (list, tuple):
        return type(value)(loaded(item) for item in value)
    return value
