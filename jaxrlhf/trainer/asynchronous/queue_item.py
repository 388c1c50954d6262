"""Checkpoint item of an off-policy schedule: collected responses, or groups in flight.

The item is a pickle that only names what `_plain_class` allows, so that reading one runs no code, whatever its bytes
say: arrays, values of records, and dataclasses and tuples of this package and of the algorithm's.
"""

import dataclasses
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any, BinaryIO

import jax
import numpy as np

from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import reason_of
from jaxrlhf.data.table.column_values import ALLOWED, Pickler, Unpickler
from jaxrlhf.episode import ShownImage

QUEUE = "queue"
"""Name of the item, and of its folder in a checkpoint."""

_FILE = "collected.pickle"
_KNOWN = ALLOWED.union(
    {
        (__name__, "shown_image"),
        *(("numpy", name) for name in ("ndarray", "dtype")),
        *(("numpy._core.multiarray", name) for name in ("_reconstruct", "scalar")),
        ("numpy._core.numeric", "_frombuffer"),
        ("ml_dtypes", "bfloat16"),
    }
)


class QueueItem:
    """Checkpoint item of plain values. Restored arrays may have any shape.

    Args:
      get: Returns the value to save; futures in the value are waited for.
      put: Takes the restored value.
      algorithm: Settings of the algorithm. Its package may define dataclasses and tuples that the value has.
    """

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], None], *, algorithm: Any) -> None:
        self._get, self._put = get, put
        self._packages = {name.partition(".")[0] for name in (__name__, type(algorithm).__module__)}

    def describe(self) -> dict[str, str]:
        return {}

    def save(self, directory: Path) -> None:
        """Write the value.

        Raises:
          Refusal: The value has something that could not be read again.
        """
        with (directory / _FILE).open("wb") as file:
            _PlainPickler(file, self._packages).dump(settled(self._get()))

    def finish(self) -> None:
        """Do nothing: `save` has written everything."""

    def merge(self) -> None:
        """Do nothing: one process wrote the whole file."""

    def restore(self, directory: Path) -> None:
        """Load the saved value and pass it to `put`.

        Raises:
          Refusal: Classes of the value have changed, with the package's version or in an algorithm's file, or the value
            has something that `save` does not write.
        """
        try:
            with (directory / _FILE).open("rb") as file:
                saved = _PlainUnpickler(file, self._packages).load()
            check_fields(saved)
        except Exception as error:  # any bytes may be there, and many errors are possible
            raise Refusal(
                f"{directory}: queued responses were saved by a different version of the code ({reason_of(error)}); "
                "resume with the original version and algorithm file, or choose another workdir"
            ) from error
        self._put(saved)


class _PlainPickler(Pickler):
    def __init__(self, file: BinaryIO, packages: set[str]) -> None:
        super().__init__(file, protocol=5)
        self._packages = packages

    def reducer_override(self, value: Any) -> Any:
        """Return how to build a value that is no built-in value, or refuse what must not be named.

        Raises:
          Refusal: The value is a function, or a class that `_plain_class` does not return.
        """
        if isinstance(value, jax.Array):
            return np.asarray(value).__reduce_ex__(5)
        if isinstance(value, ShownImage):
            return shown_image, (value.load(),)
        if isinstance(value, type | FunctionType | BuiltinFunctionType):
            module, name = value.__module__, value.__qualname__
            if (module, name) not in _KNOWN and _plain_class(module, name, self._packages) is None:
                raise Refusal(
                    f"responses that wait in a checkpoint cannot hold a {module}.{name}; use arrays, plain values, and "
                    "dataclasses or named tuples of the algorithm's package"
                )
        return NotImplemented


class _PlainUnpickler(Unpickler):
    def __init__(self, file: BinaryIO, packages: set[str]) -> None:
        super().__init__(file)
        self._packages = packages

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return pickle.Unpickler.find_class(self, module, name)
        if (kind := _plain_class(module, name, self._packages)) is not None:
            return _Uncalled(name, (), {"__new__": lambda cls, *values: kind.__new__(kind, *values)})
        return super().find_class(module, name)


class _Uncalled(type):
    """Class of stand-ins for classes: an instance of the class is made, but its constructor is not called."""

    def __call__(cls, *args: Any) -> Any:
        raise pickle.UnpicklingError(f"it calls {cls.__name__}")


def shown_image(url: str) -> ShownImage:
    """Return the image of a data URL."""
    return ShownImage.of(url)


def _plain_class(module: str, name: str, packages: set[str]) -> type | None:
    """Return a dataclass or a tuple class of a loaded module in one of the packages; None if there is none."""
    kind = getattr(sys.modules.get(module), name, None) if module.partition(".")[0] in packages else None
    plain = isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, tuple))
    return kind if plain else None


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
