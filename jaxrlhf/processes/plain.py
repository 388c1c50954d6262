"""Values of user code, and messages from its processes: dataclasses of plain values as JSON, checked when read.

Reading a message runs no user code and creates nothing but the expected dataclasses, whatever bytes a process sends.
"""

import json
import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jaxrlhf.processes.channel import Garbled

LARGEST_NUMBER = 3.4028234663852886e38
"""Largest float32."""

_LONGEST_REPR = 120


def is_number(value: Any) -> bool:
    """Return whether a value of user code is a number: `float` converts it, and it is neither a text nor an array."""
    return not isinstance(value, str | bytes) and hasattr(value, "__float__") and not getattr(value, "shape", False)


def is_finite(number: float) -> bool:
    """Return whether a number is finite in float32."""
    return math.isfinite(number) and abs(number) <= LARGEST_NUMBER


def short_repr(value: Any) -> str:
    """Return the repr of a user's value in one line, at most 120 characters long."""
    try:
        text = " ".join(repr(value).split())
    except BaseException as error:
        text = f"its repr raises {type(error).__name__}"
    return text if len(text) <= _LONGEST_REPR else text[: _LONGEST_REPR - 3] + "..."


def dumps(message: Any) -> bytes:
    """Encode a dataclass whose fields hold plain values: JSON types, bytes, tuples, sets and such dataclasses."""
    return json.dumps([type(message).__name__, message], default=_plain, ensure_ascii=False).encode(errors="replace")


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return {"bytes": value.hex()} if isinstance(value, bytes) else list(value)


def loads(message: bytes, kinds: Collection[type]) -> Any:
    """Decode a dataclass of one of the `kinds`, and check its fields against their annotations.

    Raises:
      Garbled: The bytes are not such a message.
    """
    with _checked():
        name, value = json.loads(message.decode())
        return _read(value, {kind.__name__: kind for kind in kinds}[name])


def read(value: Any, kind: Any) -> Any:
    """Convert a value from JSON to a type.

    Raises:
      Garbled: The value is not of that type.
    """
    with _checked():
        return _read(value, kind)


@contextmanager
def _checked() -> Iterator[None]:
    """Turn any error into `Garbled`: any bytes may arrive, and many errors are possible."""
    try:
        yield
    except Garbled:
        raise
    except Exception as error:
        raise Garbled(f"no message: {type(error).__name__}") from error


def _read(value: Any, kind: Any) -> Any:
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return _read_one_of(value, inner)
    if (
        isinstance(kind, type)
        and is_dataclass(kind)
        and isinstance(value, dict)
        and value.keys() == _hints(kind).keys()
    ):
        return kind(**{name: _read(value[name], hint) for name, hint in _hints(kind).items()})
    if origin in (tuple, list, frozenset, Sequence) and isinstance(value, list):
        found = [_read(one, inner[0]) for one in value]
        return found if origin is Sequence else origin(found)
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {name: _read(one, inner[1]) for name, one in value.items()}
    if kind is Hashable:
        return _read_key(value)
    if kind is float:
        fits = type(value) in (int, float) and math.isfinite(value)
        value = float(value) if fits else value
    else:
        fits = kind is Any or (value in inner if origin is Literal else type(value) is kind)
    if fits:
        return value
    raise Garbled(f"a {type(value).__name__} where {kind} is expected")


def _read_one_of(value: Any, kinds: Sequence[Any]) -> Any:
    for kind in kinds:
        try:
            return _read(value, kind)
        except Garbled:
            continue
    raise Garbled(f"a {type(value).__name__} where another type is expected")


def _read_key(value: Any) -> Hashable:
    """Return a value that can be compared: tuples were written as lists, bytes as a dict with hexadecimal digits."""
    match value:
        case list():
            return tuple(map(_read_key, value))
        case {"bytes": str(digits)}:
            return bytes.fromhex(digits)
        case dict():
            raise Garbled("a dict where a key is expected")
    return value


@lru_cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
