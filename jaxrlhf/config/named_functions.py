"""Functions and classes that settings name, so that reading a configuration imports no JAX."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrlhf.config.refusal import Refusal, require


def function_of(settings: object, attribute: str) -> Callable[..., Any]:
    """The function that a class of settings has as `attribute`: itself, or named as `module:function`.

    Raises:
      Refusal: There is no such function, or its module does not import.
    """
    owner = type(settings)
    return imported(getattr(owner, attribute, None), f"{owner.__name__}.{attribute}")


def imported(given: object, what: str) -> Any:
    """A function or class: itself, or named as `module:function`.

    Args:
      what: Name of the setting, for messages.

    Raises:
      Refusal: There is none of that name, or its module does not import.
    """
    if callable(given):
        return given
    where = f"{what}={given!r}"
    module, colon, name = given.partition(":") if isinstance(given, str) else ("", "", "")
    if not (module and colon and name):
        raise Refusal(f"{where} is no function; give one, or its name as 'module:function'")
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise Refusal(f"{where}: importing {module} failed with {error}") from error
    if not callable(function):
        raise Refusal(f"{where}: {module} has no function {name!r}")
    return function


def check_reference(reference: str, what: str) -> None:
    """Refuse what names no function or class as `module:name` or `path/to/file.py:name`."""
    require(":" in reference, f"{what} must be 'module:name' or 'file.py:name', got {reference!r}")


def find_neighbours(file: Path) -> None:
    """Let a user's file import others of its folder, which is appended to `sys.path`."""
    folder = str(file.absolute().parent)
    if folder not in sys.path:
        sys.path.append(folder)
