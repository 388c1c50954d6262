"""Safe unpickling of data from elsewhere: no code of a user or of an attacker runs while reading."""

import io
import pickle
from collections.abc import Collection
from dataclasses import is_dataclass
from typing import Any
from zoneinfo import ZoneInfo

ALLOWED_MODULES = ("jaxrlhf.episode", "jaxrlhf.processes.forking", "jaxrlhf.environments.protocol")
"""Modules whose dataclasses a message may contain, in addition to built-in types."""

COLUMN_VALUES = frozenset(
    {
        *(("datetime", name) for name in ("date", "datetime", "time", "timedelta", "timezone")),
        ("decimal", "Decimal"),
        ("uuid", "UUID"),
        *(("pytz", name) for name in ("_UTC", "_p")),
    }
)
"""Module and name of the further types that values of data columns may have; `dumps` names time zones itself."""


class _Plain(pickle.Unpickler):
    def __init__(self, message: bytes, also: Collection[tuple[str, str]]) -> None:
        super().__init__(io.BytesIO(message))
        self._also = also

    def persistent_load(self, key: Any) -> Any:
        return ZoneInfo(key)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._also:
            return super().find_class(module, name)
        found = super().find_class(module, name) if module in ALLOWED_MODULES else None
        if not (isinstance(found, type) and is_dataclass(found) and found.__module__ == module):
            raise pickle.UnpicklingError(f"a message holds a {module}.{name}")
        return found


class _WithZones(pickle.Pickler):
    def persistent_id(self, value: Any) -> str | None:
        """Return the name of a time zone, which would be pickled as a call of any function."""
        return value.key if isinstance(value, ZoneInfo) else None


def dumps(value: Any) -> bytes:
    """Pickle a value for `loads`."""
    written = io.BytesIO()
    _WithZones(written).dump(value)
    return written.getvalue()


def loads(message: bytes, *, also: Collection[tuple[str, str]] = ()) -> Any:
    """Unpickle a message.

    Args:
      also: Module and name of further types that the message may hold.

    Raises:
      pickle.UnpicklingError: The message holds types other than built-in types, message dataclasses and `also`. Corrupt
        bytes may raise other errors.
    """
    return _Plain(message, also).load()
