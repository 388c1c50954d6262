"""Freed memory goes back to the system: the C library would keep what compilers and phases of a step leave free."""

import ctypes
from functools import cache

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""Event of JAX: a program was compiled or loaded, and has not run yet."""
LONG_COMPILATION_S = 0.2
"""Shorter ones leave little."""


def return_free_memory() -> None:
    """Give back what this process has freed; does nothing where the C library is not glibc.

    Tens of milliseconds, and what is used again has to be asked for again: for the ends of phases.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@cache
def return_after_compiling() -> None:
    """From now on, give back what a compiler leaves free before its program asks for memory; safe to call again."""
    jax.monitoring.register_event_duration_secs_listener(_listen)


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    if event == COMPILE_EVENT and duration_secs >= LONG_COMPILATION_S:
        return_free_memory()
