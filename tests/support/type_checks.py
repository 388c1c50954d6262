"""Type checks of annotated calls while tests run, by the rules of mypy: an int is taken where a float is declared."""

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable
from functools import wraps
from types import CodeType
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))

CALLS = 16
"""Calls of each function that are checked in a test. A run repeats them; checks would be a third of its time."""

_calls: Counter[CodeType] = Counter()

begin_test = _calls.clear
"""Have the first calls of every function checked anew."""


def check_first_calls() -> None:
    """Have what `jaxtyping`'s import hook decorates from now on check the first calls of each test alone."""
    original = jaxtyping.jaxtyped

    def jaxtyped(*, typechecker: Callable) -> Callable:
        def decorate(of: Any) -> Any:
            if inspect.isfunction(of):
                return _first_calls(of, original(typechecker=typechecker)) if of.__annotations__ else of
            if dataclasses.is_dataclass(of) and inspect.isfunction(of.__init__) and "__init__" in vars(of):
                of.__init__ = _first_calls(of.__init__, original(typechecker=typechecker))
                return of
            return original(of, typechecker=typechecker)

        return decorate

    jaxtyping.jaxtyped = jaxtyped


def _first_calls(plain: Callable, checking: Callable) -> Callable:
    checked, code = None, plain.__code__

    @wraps(plain)
    def called(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal checked
        if _calls[code] >= CALLS:
            return plain(*args, **kwargs)
        _calls[code] += 1
        if checked is None:  # not before: most functions are not called, and some are made anew at every call
            checked = checking(plain)
        return checked(*args, **kwargs)

    return called
