"""Freed memory goes back to the system: the C library would keep what compilers and phases of a step leave free."""

import ctypes


def return_free_memory() -> None:
    """Give back what this process has freed; does nothing where the C library is not glibc.

    Tens of milliseconds, and what is used again has to be asked for again: for the ends of phases.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
