"""Counters of compilations, and of peak memory."""

import sys

import jax

from jaxrlhf.runtime.free_memory import COMPILE_EVENT

LOAD_EVENT = "/jax/compilation_cache/cache_hits"


class CompileCounter:
    """Counter of XLA compilations, and of programs loaded from the compilation cache, until it is closed.

    Attributes:
      count: Number of programs compiled or loaded.
      loaded: Number of programs that were loaded from the compilation cache.
      seconds: Seconds that compiling and loading took.
    """

    def __init__(self) -> None:
        self.count = self.loaded = 0
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        jax.monitoring.register_event_listener(self._listen_loads)

    def _listen_loads(self, event: str, **_: str | int) -> None:
        self.loaded += event == LOAD_EVENT

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT:
            self.count += 1
            self.seconds += duration_secs

    def close(self) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)
        jax.monitoring.unregister_event_listener(self._listen_loads)

    def __enter__(self) -> "CompileCounter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def peak_memory_bytes() -> int:
    """Return the peak memory so far, in bytes: summed over this host's accelerators, or of the process on CPU."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(stat and "peak_bytes_in_use" in stat for stat in stats):
        return sum(stat["peak_bytes_in_use"] for stat in stats)
    import resource  # not on every system, and only needed here

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kibibytes except on macOS
