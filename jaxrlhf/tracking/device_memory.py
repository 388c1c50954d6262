"""Device memory: peak usage during a phase of a run."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import jax

SAMPLE_S = 0.05
"""Seconds between two measurements."""

MAX_SAMPLING_SHARE = 0.01
"""Largest share of the time spent on measuring; if a measurement takes long, measurements become rare."""

_POINTERS_WAIT = jax.version.__version_info__ >= (0, 11)
"""True if reading the pointer of a buffer waits for the program that fills the buffer."""


class DevicePeak:
    """Peak memory: most bytes in use at once on any device, between entering and leaving the context.

        with DevicePeak() as peak:
            update(batch)
        metrics["memory/update_bytes"] = peak.bytes

    On accelerators, which count their memory, the peak includes the temporaries of programs. It is the backend's own
    peak if this peak rose during the phase, else the largest measurement of a thread that samples the memory. On CPU it
    is the largest size of live arrays. Arrays that are alive at the start or at the end are counted exactly. Host
    memory does not count.

    Args:
      devices: Devices to watch, by default all devices of this process; devices of other processes are ignored.

    Attributes:
      bytes: Peak so far, in bytes; final once the context is left.
    """

    def __init__(self, devices: Sequence[jax.Device] | None = None) -> None:
        self.bytes = 0
        local = jax.local_devices()
        self._devices = local if devices is None else [device for device in devices if device in local]
        self._closed = threading.Event()
        self._measured_s = 0.0

    def __enter__(self) -> "DevicePeak":
        self._peaks = _peaks_ever(self._devices)
        self._measure()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device-peak")
        self._sampling: Future[None] = self._thread.submit(self._sample)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.shutdown()
        self._measure()
        pairs = zip(self._peaks, _peaks_ever(self._devices), strict=True)
        self.bytes = max([self.bytes, *(after for before, after in pairs if after > before)])
        self._sampling.result()  # raises what the thread raised

    def _sample(self) -> None:
        while not self._closed.wait(max(SAMPLE_S, self._measured_s / MAX_SAMPLING_SHARE)):
            self._measure()

    def _measure(self) -> None:
        start = time.thread_time()
        self.bytes = max([self.bytes, *bytes_in_use(self._devices)])
        self._measured_s = time.thread_time() - start


def bytes_in_use(devices: Sequence[jax.Device]) -> list[int]:
    """Return the bytes in use on each of this process's devices, by the backend's count, or of live arrays."""
    stats = [device.memory_stats() or {} for device in devices]
    if all("bytes_in_use" in stat for stat in stats):
        return [stat["bytes_in_use"] for stat in stats]
    counts = _live_bytes()
    return [counts[device] for device in devices]


def _peaks_ever(devices: Sequence[jax.Device]) -> list[int]:
    """Return the most bytes that each device ever had in use; 0 if the backend does not count."""
    return [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices]


def _live_bytes() -> Counter[jax.Device]:
    """Return the bytes of live arrays in each device's default memory. A buffer that arrays share counts once.

    If reading a pointer waits (`_POINTERS_WAIT`), it holds the interpreter's lock, which the program needs to end.
    Then an array that is still being computed counts by itself, without its pointer. (JAX 0.10 does not wait, and
    crashes in `is_ready` of a deleted array.)
    """
    buffers: dict[tuple[jax.Device, int, bool], int] = {}
    for array in jax.live_arrays():
        try:
            for device, shard in _shards(array):
                if shard.sharding.memory_kind in (None, device.default_memory().kind):
                    ready = not _POINTERS_WAIT or cast(Any, shard).is_ready()
                    address = shard.unsafe_buffer_pointer() if ready else id(shard)
                    buffers[device, address, ready] = shard.nbytes
        except RuntimeError as error:
            # Another thread may delete the array, or an array that shares its buffers, during the count. If the array
            # itself is deleted, the error may mention shards instead.
            if "deleted" not in str(error) and not array.is_deleted():
                raise
    counts: Counter[jax.Device] = Counter()
    for (device, _, _), size in buffers.items():
        counts[device] += size
    return counts


def _shards(array: jax.Array) -> list[tuple[jax.Device, jax.Array]]:
    if len(array.sharding.device_set) > 1:
        return [(shard.device, shard.data) for shard in array.addressable_shards]
    # Accessing its only shard would create one more live array, whose shard would be another.
    return [(device, array) for device in array.sharding.addressable_devices]
