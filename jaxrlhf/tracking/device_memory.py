"""Device memory: how much a phase of a run takes at its worst moment."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import jax

LOOK_S = 0.05
"""Between two looks at the memory."""

LOOKING_SHARE = 0.01
"""Most of the time that looking may take: where a look takes long, looks become rare."""

_POINTERS_WAIT = jax.version.__version_info__ >= (0, 11)
"""True where asking for the place of a buffer waits for the program that fills the buffer."""


class DevicePeak:
    """Most bytes in use at once on any device, between entering and leaving.

        with DevicePeak() as peak:
            update(batch)
        metrics["memory/update_bytes"] = peak.bytes

    On accelerators, which count their memory, the temporaries of programs are in it: the peak is
    the backend's own where that rose in the phase, else the most that a thread saw by looking now
    and then. On CPU it is the most that the arrays alive took. Exact for what is alive at the
    beginning and at the end. Memory of the host does not count.

    Args:
      devices: Devices to watch; all of this process by default, and none of other processes.

    Attributes:
      bytes: The peak so far; final once the phase is left.
    """

    def __init__(self, devices: Sequence[jax.Device] | None = None) -> None:
        self.bytes = 0
        own = jax.local_devices()
        self._devices = own if devices is None else [device for device in devices if device in own]
        self._left = threading.Event()
        self._look_took_s = 0.0

    def __enter__(self) -> "DevicePeak":
        self._peaks = _peaks_ever(self._devices)
        self._look()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device-peak")
        self._watching: Future[None] = self._thread.submit(self._watch)
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.shutdown()
        self._look()
        pairs = zip(self._peaks, _peaks_ever(self._devices), strict=True)
        self.bytes = max([self.bytes, *(after for before, after in pairs if after > before)])
        self._watching.result()  # raises what the thread raised

    def _watch(self) -> None:
        while not self._left.wait(max(LOOK_S, self._look_took_s / LOOKING_SHARE)):
            self._look()

    def _look(self) -> None:
        start = time.thread_time()
        self.bytes = max([self.bytes, *bytes_in_use(self._devices)])
        self._look_took_s = time.thread_time() - start


def bytes_in_use(devices: Sequence[jax.Device]) -> list[int]:
    """Bytes that each of this process's devices has in use: as its backend counts, or of the arrays alive."""
    stats = [device.memory_stats() or {} for device in devices]
    if all("bytes_in_use" in stat for stat in stats):
        return [stat["bytes_in_use"] for stat in stats]
    counts = _bytes_alive()
    return [counts[device] for device in devices]


def _peaks_ever(devices: Sequence[jax.Device]) -> list[int]:
    """The most that each device ever had in use, 0 where the backend does not count."""
    return [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices]


def _bytes_alive() -> Counter[jax.Device]:
    """Bytes of the arrays alive in each device's default memory. A buffer that arrays share counts once.

    Where pointers wait, they do so with the interpreter's lock, which the program needs to end: an array that is still
    computed counts by itself there. (JAX 0.10 does not wait, and crashes in `is_ready` of a deleted array.)
    """
    buffers: dict[tuple[jax.Device, int, bool], int] = {}
    for array in jax.live_arrays():
        try:
            for device, shard in _shards(array):
                if shard.sharding.memory_kind in (None, device.default_memory().kind):
                    ready = not _POINTERS_WAIT or cast(Any, shard).is_ready()
                    place = shard.unsafe_buffer_pointer() if ready else id(shard)
                    buffers[device, place, ready] = shard.nbytes
        except RuntimeError as error:
            # Another thread may delete an array, or another that shares its buffers, while it is counted; of the former
            # the error may speak of shards.
            if "deleted" not in str(error) and not array.is_deleted():
                raise
    counts: Counter[jax.Device] = Counter()
    for (device, _, _), size in buffers.items():
        counts[device] += size
    return counts


def _shards(array: jax.Array) -> list[tuple[jax.Device, jax.Array]]:
    if len(array.sharding.device_set) > 1:
        return [(shard.device, shard.data) for shard in array.addressable_shards]
    # Its only shard would be one more array alive, and that one's shard another.
    return [(device, array) for device in array.sharding.addressable_devices]
