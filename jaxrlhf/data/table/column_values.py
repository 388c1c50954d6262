"""Pickles of the values that data columns may have; reading one builds no other object, whatever its bytes say."""

import io
import pickle
from typing import Any
from zoneinfo import ZoneInfo

ALLOWED = frozenset(
    {
        *(("datetime", name) for name in ("date", "datetime", "time", "timedelta", "timezone")),
        ("decimal", "Decimal"),
        ("uuid", "UUID"),
        *(("pytz", name) for name in ("_UTC", "_p")),
    }
)
"""Module and name of the types that a value may have, besides built-in types and time zones."""


class Pickler(pickle.Pickler):
    """Pickler of the values that data columns may have."""

    def persistent_id(self, value: Any) -> str | None:
        """Return the name of a time zone, which would be pickled as a call of any function."""
        return value.key if isinstance(value, ZoneInfo) else None


class Unpickler(pickle.Unpickler):
    """Unpickler that builds no other objects."""

    def persistent_load(self, key: Any) -> Any:
        return ZoneInfo(key)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it holds a {module}.{name}")
        return super().find_class(module, name)


def dumps(value: Any) -> bytes:
    """Pickle a record for `loads`."""
    written = io.BytesIO()
    Pickler(written).dump(value)
    return written.getvalue()


def loads(content: bytes) -> Any:
    """Unpickle a record.

    Raises:
      pickle.UnpicklingError: The record holds a type that data columns do not have.
    """
    return Unpickler(io.BytesIO(content)).load()
