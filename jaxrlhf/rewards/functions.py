"""From the name of a reward function to the function."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.config.named_functions import load
from jaxrlhf.rewards.protocol import Function, asks_question


def resolve(reference: str, settings: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The function that `module:function` or `path/to/file.py:function` names, with `settings` bound.

    A setting that is a `Function` is resolved too. The directory of a `file.py` is appended to
    `sys.path`, so the file may import its neighbours.

    Raises:
      Refusal: In one line, if there is no such file, module or function, if importing it
        fails, or if it cannot be called with a prompt, a response, an answer and a record.
    """
    function = load(reference, "reward function")
    given = {
        name: resolve(value.reference, value.settings) if isinstance(value, Function) else value
        for name, value in (settings or {}).items()
    }
    bound = functools.partial(function, **given) if given else function
    _check_signature(reference, bound)
    return bound


def _check_signature(reference: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C do not tell
        return
    try:
        signature.bind("prompt", "response", "answer", {}, **({"question": ""} if asks_question(function) else {}))
    except TypeError as error:
        raise Refusal(
            f"reward function {reference!r} has the signature {signature}; "
            f"it is called as function(prompt, response, answer, record), and that fails with: {error}"
        ) from error
