"""A configuration as plain data, for `config.json` and for goldens."""

import dataclasses
from typing import Any


def to_json(settings: Any) -> Any:
    """Settings as JSON data; dataclasses carry the name of their class under `class`, functions are their names."""
    if dataclasses.is_dataclass(settings):
        fields = {field.name: to_json(getattr(settings, field.name)) for field in dataclasses.fields(settings)}
        return {"class": type(settings).__name__, **fields}
    if isinstance(settings, tuple):
        return [to_json(item) for item in settings]
    if callable(settings):
        return getattr(settings, "__qualname__", repr(settings))
    return settings
