"""The table of variants: reference functions, and what computes the same faster on one backend."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from jaxrlhf.sharding.described import platform

F = TypeVar("F", bound=Callable[..., Any])


def variants(**by_backend: Callable[..., Any]) -> Callable[[F], F]:
    """Decorate a reference with variants of the same signature, by the name of their backend.

    Which it is traced for is asked while a program is traced. `__wrapped__` is the reference.
    """

    def decorate(reference: F) -> F:
        @functools.wraps(reference)
        def choose(*arguments: Any) -> Any:
            return by_backend.get(platform(), reference)(*arguments)

        return choose  # type: ignore[return-value]

    return decorate
