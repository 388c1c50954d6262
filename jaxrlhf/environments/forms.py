"""Loading of user code: tools, environments with `step`, environments whose methods are tools, and agent programs.

Tool schemas are made and factories are tried in forks, so that the fork server stays small and in the state after the
import of the user code.
"""

import inspect
import os
import pickle
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MethodType
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.config.environments import Environment, Tools
from jaxrlhf.config.named_functions import check_call, load, one_line
from jaxrlhf.environments.host import UserCode, reset_arguments
from jaxrlhf.environments.protocol import About, Choice
from jaxrlhf.episode import ToolSchema

PROTOCOL_METHODS = ("reset", "close", "get_reward")


def load_choice(choice: Choice) -> UserCode:
    """Load the code of an environment setting.

    Raises:
      Refusal: The code cannot be loaded, or no schema can be made of a tool; the message says which and why.
    """
    if isinstance(choice, Tools):
        return _load_tools(choice)
    if isinstance(choice, Environment):
        factory = load(choice.factory, "environment")
        return UserCode(choice, in_fork(lambda: _describe(choice.factory, factory), choice.factory), factory=factory)
    program = load(choice.program, "agent program")
    check_call(f"agent program {choice.program!r}", program, "session", "record")
    return UserCode(choice, About(), program=program)


def _load_tools(choice: Tools) -> UserCode:
    functions: dict[str, Callable[..., Any]] = {}
    for reference in choice.functions:
        function = load(reference, "tool")
        name = getattr(function, "__name__", reference.rpartition(":")[2])
        if name in functions:
            raise Refusal(f"tool {reference!r}: there is another tool of the name {name!r}; rename one of them")
        functions[name] = function
    named = list(zip(choice.functions, functions.values(), strict=True))
    schemas = in_fork(lambda: tuple(_schema(*one) for one in named), ", ".join(choice.functions))
    return UserCode(choice, About(schemas, waits=_async_names(functions)), functions)


def tool_methods(kind: type) -> dict[str, Callable[..., Any]]:
    """Return the methods of a class that are tools: all public methods except `reset`, `close` and `get_reward`."""
    return {
        name: method
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if name[0] != "_" and name not in PROTOCOL_METHODS
    }


def in_fork(function: Callable[[], Any], what: str) -> Any:
    """Run a function in a fork of this process and return its value.

    Raises:
      Refusal: The function raised a `Refusal`, or the fork ended without a value.
    """
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(reads)
            with os.fdopen(writes, "wb") as file:
                try:
                    pickle.dump(function(), file)
                except Refusal as error:
                    pickle.dump(error, file)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writes)
    value = None
    with os.fdopen(reads, "rb") as file, suppress(EOFError, pickle.UnpicklingError):
        value = pickle.load(file)
    os.waitpid(pid, 0)
    if isinstance(value, Refusal):
        raise value
    if value is None:
        raise Refusal(f"{what}: the process that examined it ended; its output says why")
    return value


def _describe(reference: str, factory: Any) -> About:
    """Describe an environment by its class, or by the class of an instance that the factory makes."""
    kind = factory
    if isinstance(factory, type):
        check_call(f"environment {reference!r}", factory)
    else:
        try:
            kind = type(factory())
        except BaseException as error:
            raise Refusal(f"environment {reference!r}: calling it failed with {one_line(error)}") from error
    if not callable(getattr(kind, "reset", None)):
        raise Refusal(
            f"environment {reference!r}: {kind.__name__} has no method reset; give it reset(record) and step(reply), "
            "or reset(**record) and public methods that are tools"
        )
    if hasattr(kind, "step"):
        reset = _bound_method(kind, "reset")
        args, seed = reset_arguments(reset, "record", 0)
        check_call(f"method '{reference}.reset'", reset, *("record", "seed")[: len(args)], **seed)
        check_call(f"method '{reference}.step'", _bound_method(kind, "step"), "reply")
        return About()
    methods = tool_methods(kind)
    if not methods:
        raise Refusal(
            f"environment {reference!r}: {kind.__name__} has neither a method step nor public methods that are tools"
        )
    schemas = tuple(_schema(f"{reference}.{name}", _bound_method(kind, name)) for name in methods)
    return About(schemas, methods=True, waits=_async_names(methods))


def _bound_method(kind: type, name: str) -> Callable[..., Any]:
    """Return a method bound as on an instance; a static method or class method is returned as it is."""
    method: Callable[..., Any] = getattr(kind, name)
    if isinstance(inspect.getattr_static(kind, name), staticmethod) or inspect.ismethod(method):
        return method
    return MethodType(method, object())


def _schema(reference: str, function: Callable[..., Any]) -> ToolSchema:
    """Make the schema of a tool from its type hints and docstring, with transformers."""
    from transformers.utils import get_json_schema

    try:
        schema = get_json_schema(function)
    except Exception as error:
        raise Refusal(
            f"tool {reference!r}: no schema can be made of it: {one_line(error)}; it needs a docstring, and for every "
            "argument a type hint and a line under 'Args:'"
        ) from error
    schema["function"].pop("return", None)  # adds no information to the description
    return schema


def _async_names(functions: Mapping[str, Callable[..., Any]]) -> frozenset[str]:
    return frozenset(name for name, one in functions.items() if inspect.iscoroutinefunction(one))
