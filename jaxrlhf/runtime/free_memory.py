"""Return of freed memory to the system: the C library would keep memory that compilers and phases of a step free."""

import ctypes
from functools import cache

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""JAX event: a program was compiled or loaded, and has not run yet."""
LONG_COMPILATION_S = 0.2
"""Minimum seconds of a compilation after which memory is returned; shorter compilations leave little."""


def return_free_memory() -> None:
    """Return this process's freed memory to the system; does nothing if the C library is not glibc.

    Takes tens of milliseconds, and later allocations must request the memory again, so call it at the ends of phases.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@cache
def return_after_compiling() -> None:
    """Return freed memory after each long compilation from now on, before the program runs; safe to call again."""
    jax.monitoring.register_event_duration_secs_listener(_listen)


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    if event == COMPILE_EVENT and duration_secs >= LONG_COMPILATION_S:
        return_free_memory()
