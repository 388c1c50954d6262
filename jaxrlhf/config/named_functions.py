"""Functions and classes that settings name by text, imported on use, and shipped configurations.

Reading a configuration therefore imports no JAX.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrlhf.config.refusal import Refusal

_PACKAGE = Path(__file__).parents[1]


def shipped() -> dict[str, Path]:
    """Return the configurations that ship with the package, by name.

    `recipes/` holds those for production runs, `algorithms/` those with an algorithm of their own.
    """
    installed = _PACKAGE / "configs"  # location in the wheel
    folder = installed if installed.is_dir() else _PACKAGE.parent / "configs"
    return {path.stem: path for path in sorted(folder.rglob("*.py"), key=lambda path: path.stem)}


def shipped_file(name: str) -> Path | None:
    """Return the shipped configuration of a name, such as `luffy` or `algorithms/luffy.py`; None if there is none."""
    wanted = Path(name.removesuffix(".py")).parts
    path = shipped().get(wanted[-1]) if wanted else None
    return path if path is not None and path.with_suffix("").parts[-len(wanted) :] == wanted else None


def function_of(settings: object, attribute: str) -> Callable[..., Any]:
    """Return the function that a settings class has as `attribute`: the function itself, or named as `module:function`.

    Raises:
      Refusal: The function does not exist, or its module cannot be imported.
    """
    owner = type(settings)
    return imported(getattr(owner, attribute, None), f"{owner.__name__}.{attribute}")


def imported(given: object, what: str) -> Any:
    """Return a function or class given directly, or `load` it by its name.

    Args:
      what: Name of the setting, for messages.

    Raises:
      Refusal: The name does not exist, or its module cannot be imported.
    """
    if callable(given):
        return given
    if not isinstance(given, str):
        raise Refusal(f"{what}={given!r} is not a function; give a function, or its name as 'module:function'")
    return load(given, what)


def load(reference: str, what: str) -> Any:
    """Return the callable named `module:name` or `path/to/file.py:name`.

    A `file.py` that does not exist is looked up among the shipped configurations. The
    folder of a file is appended to `sys.path`, so the file may import its neighbors.

    Args:
      what: Words before the reference in a message, such as `reward function`.

    Raises:
      Refusal: One line: the file, module or name does not exist, importing it fails, or it cannot be called.
    """
    source, colon, name = reference.rpartition(":")
    if not (source and colon and name):
        raise Refusal(f"{what} {reference!r} is not of the form 'module:function' or 'file.py:function'")
    module = _load_file(reference, Path(source), what) if source.endswith(".py") else _module(reference, source, what)
    found = getattr(module, name, None)
    if found is None:
        raise Refusal(f"{what} {reference!r}: {source} has no {name!r}; {_offer(module)}")
    if not callable(found):
        raise Refusal(f"{what} {reference!r} is a {type(found).__name__}, which cannot be called")
    return found


def check_call(what: str, function: Callable[..., Any], *args: str, **fields: Any) -> None:
    """Raise `Refusal` if a function cannot be called with these arguments.

    Args:
      what: Name of the function in the message.
      args: Names of the positional arguments.
      fields: Further arguments by name.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    try:
        signature.bind(*args, **fields)
    except TypeError as error:
        called = ", ".join([*args, *(f"{name}={name}" for name in fields)])
        raise Refusal(
            f"{what} has the signature {signature}, but is called with ({called}), which fails with: {error}"
        ) from error


def _module(reference: str, name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise Refusal(f"{what} {reference!r}: importing {name} failed with {one_line(error)}") from error


def _load_file(reference: str, path: Path, what: str) -> ModuleType:
    if not path.is_file():
        path = shipped_file(str(path)) or path
    if not path.is_file():
        raise Refusal(f"{what} {reference!r}: there is no file {path} (relative to {Path.cwd()})")
    path = path.resolve()
    find_neighbours(path)
    name = f"{what.split()[0]}_file_{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Refusal(f"{what} {reference!r}: {path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up classes here
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise Refusal(f"{what} {reference!r}: running {path} failed with {one_line(error)}") from error
    return module


def _offer(module: ModuleType) -> str:
    names = sorted(name for name, value in vars(module).items() if inspect.isfunction(value) and name[0] != "_")
    return f"its functions are {', '.join(names)}" if names else "it has no functions"


def one_line(error: BaseException) -> str:
    """Return `Type: message` with line breaks folded, at most 300 characters."""
    try:
        message = str(error)
    except Exception as worse:  # a user's error class whose __str__ fails
        message = f"str() of the error failed with {type(worse).__name__}"
    text = " ".join(f"{type(error).__name__}: {message}".split())
    return text if len(text) <= 300 else text[:297] + "..."


def find_neighbours(file: Path) -> None:
    """Let a user's file import other files of its folder, by appending the folder to `sys.path`."""
    folder = str(file.absolute().parent)
    if folder not in sys.path:
        sys.path.append(folder)
