"""Freed memory returns to the system."""

import ctypes
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxrlhf.runtime import free_memory
from jaxrlhf.runtime.free_memory import COMPILE_EVENT, return_after_compiling, return_free_memory


def resident_mb() -> int:
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) // 1024


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_freed_memory_below_what_is_in_use_is_given_back() -> None:
    blocks = [bytes(4000) for _ in range(50_000)]
    kept = blocks[::1000]  # all over the heap, so that its end cannot just be cut off
    full = resident_mb()
    del blocks
    return_free_memory()
    assert full - resident_mb() > 150 and len(kept) == 50


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    return_free_memory()


def test_memory_is_given_back_after_a_long_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[bool] = []
    monkeypatch.setattr(free_memory, "return_free_memory", lambda: returned.append(True))
    return_after_compiling()
    return_after_compiling()
    jax.monitoring.record_event_duration_secs(COMPILE_EVENT, 1.0)
    assert len(returned) == 1
    jax.monitoring.record_event_duration_secs(COMPILE_EVENT, 0.01)
    jax.monitoring.record_event_duration_secs("/jax/core/compile/jaxpr_trace_duration", 1.0)
    assert len(returned) == 1
    monkeypatch.setattr(free_memory, "LONG_COMPILATION_S", 0.0)
    jax.jit(lambda x: x + len(returned)).lower(jnp.zeros(3)).compile()  # JAX has this event
    assert len(returned) > 1
