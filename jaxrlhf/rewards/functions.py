"""From the name of a reward function to the function."""

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.rewards.protocol import Function


def resolve(reference: str, settings: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The function that `module:function` or `path/to/file.py:function` names, with `settings` bound.

    A setting that is a `Function` is resolved too. The directory of a `file.py` is appended to
    `sys.path`, so the file may import its neighbours.

    Raises:
      Refusal: In one line, if there is no such file, module or function, if importing it
        fails, or if it cannot be called with a prompt, a response, an answer and a record.
    """
    source, colon, name = reference.rpartition(":")
    if not (source and colon and name):
        raise Refusal(f"reward function {reference!r} is not of the form 'module:function' or 'file.py:function'")
    module = _load_file(reference, Path(source)) if source.endswith(".py") else _load_module(reference, source)
    function = getattr(module, name, None)
    if function is None:
        raise Refusal(f"reward function {reference!r}: {source} has no {name!r}; {_offer(module)}")
    if not callable(function):
        raise Refusal(f"reward function {reference!r} is a {type(function).__name__}, which cannot be called")
    given = {
        name: resolve(value.reference, value.settings) if isinstance(value, Function) else value
        for name, value in (settings or {}).items()
    }
    bound = functools.partial(function, **given) if given else function
    _check_signature(reference, bound)
    return bound


def _load_module(reference: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise Refusal(f"reward function {reference!r}: importing {name} failed with {one_line(error)}") from error


def _load_file(reference: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise Refusal(f"reward function {reference!r}: there is no file {path} (looked from {Path.cwd()})")
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name = f"reward_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Refusal(f"reward function {reference!r}: {path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look classes up here
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise Refusal(f"reward function {reference!r}: running {path} failed with {one_line(error)}") from error
    return module


def _check_signature(reference: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C do not tell
        return
    try:
        signature.bind("prompt", "response", "answer", {})
    except TypeError as error:
        raise Refusal(
            f"reward function {reference!r} has the signature {signature}; "
            f"it is called as function(prompt, response, answer, record), and that fails with: {error}"
        ) from error


def _offer(module: ModuleType) -> str:
    names = sorted(name for name, value in vars(module).items() if inspect.isfunction(value) and name[0] != "_")
    return f"its functions are {', '.join(names)}" if names else "it has no functions"


def one_line(error: BaseException) -> str:
    """`Type: message` with line breaks folded, at most 300 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:297] + "..."
