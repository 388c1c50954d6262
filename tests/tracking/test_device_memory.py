"""Peak memory of a phase: arrays that count, and arrays that do not."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrlhf.tracking import device_memory
from jaxrlhf.tracking.device_memory import SAMPLE_S, DevicePeak, bytes_in_use

MESH = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
SPLIT = NamedSharding(MESH, PartitionSpec("data", "tensor"))
KIB = 1024


def of_kib(kib: int, sharding: NamedSharding = SPLIT) -> jax.Array:
    """Return an array of zeros of a size in KiB."""
    return jax.device_put(np.zeros((2 * kib, 128), np.float32), sharding)


@pytest.fixture
def before(no_leftovers: None) -> list[int]:
    """Return the bytes that other tests left alive, and that no garbage collection during the test frees."""
    return bytes_in_use(jax.local_devices())


def test_arrays_alive_at_the_start_count_in_a_short_phase(before: list[int]) -> None:
    array = of_kib(8000)
    with DevicePeak() as peak:
        array.delete()
    assert peak.bytes == max(before) + 1000 * KIB


def test_arrays_alive_at_the_end_count_in_a_short_phase(before: list[int]) -> None:
    with DevicePeak() as peak:
        array = of_kib(8000)
    assert peak.bytes == max(before) + 1000 * KIB
    array.delete()
    with DevicePeak() as later:
        pass
    assert later.bytes == max(before)


def test_temporary_array_is_measured(before: list[int]) -> None:
    with DevicePeak() as peak:
        array, patience = of_kib(8000), time.monotonic() + 10
        while peak.bytes == max(before) and time.monotonic() < patience:  # looks are rare where arrays are many
            time.sleep(SAMPLE_S)
        array.delete()
    assert peak.bytes == max(before) + 1000 * KIB


def test_peak_is_the_largest_over_devices(before: list[int]) -> None:
    spread, single = of_kib(8000), jax.device_put(np.zeros((64, 1024), np.float32), jax.devices()[5])
    with DevicePeak() as peak:
        pass
    assert peak.bytes == max(size + 1000 * KIB + (256 * KIB if at == 5 else 0) for at, size in enumerate(before))
    del spread, single


def test_only_the_given_devices_count(before: list[int]) -> None:
    spread, single = of_kib(8000), jax.device_put(np.zeros((64, 1024), np.float32), jax.devices()[5])
    with DevicePeak(jax.devices()[:4]) as without, DevicePeak(jax.devices()[4:6]) as within:
        pass
    assert without.bytes == max(before[:4]) + 1000 * KIB
    assert within.bytes == max(before[4], before[5] + 256 * KIB) + 1000 * KIB
    del spread, single


def test_host_memory_does_not_count(before: list[int]) -> None:
    array = jax.device_put(of_kib(8000), SPLIT.with_memory_kind("pinned_host"))
    assert bytes_in_use(jax.local_devices()) == before
    array.delete()


def test_views_of_one_buffer_count_once(before: list[int]) -> None:
    array = of_kib(8000)
    shards = [shard.data for shard in array.addressable_shards]
    same = jax.make_array_from_single_device_arrays(array.shape, SPLIT, shards)
    counted = [bytes_in_use(jax.local_devices()) for _ in range(3)]  # looking makes no arrays that it then counts
    assert counted == [[size + 1000 * KIB for size in before]] * 3
    del same


def test_measuring_creates_no_arrays() -> None:
    array, single = of_kib(800), jnp.ones(8)
    bytes_in_use(jax.local_devices())
    alive = len(jax.live_arrays())
    for _ in range(3):
        bytes_in_use(jax.local_devices())
    assert len(jax.live_arrays()) == alive
    del array, single


def test_arrays_may_be_deleted_during_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "SAMPLE_S", 0.0)
    monkeypatch.setattr(device_memory, "MAX_SAMPLING_SHARE", 1.0)

    def churn() -> None:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            for array in [of_kib(16) for _ in range(20)]:
                array.delete()

    threads = [threading.Thread(target=churn) for _ in range(3)]
    with DevicePeak() as peak:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert peak.bytes > 0


def test_array_deleted_during_its_count_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    array = of_kib(800)
    shards = device_memory._shards(array)
    array.delete()
    monkeypatch.setattr(jax, "live_arrays", lambda: [array])
    monkeypatch.setattr(device_memory, "_shards", lambda _: shards)  # taken while it was alive
    assert bytes_in_use(jax.local_devices()) == [0] * 8


def test_unfinished_array_counts_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    class Computed:
        """Array of a running program; JAX 0.11 would wait for the program, with the interpreter's lock."""

        nbytes = 800
        sharding = of_kib(8).sharding

        def is_ready(self) -> bool:
            return False

        def unsafe_buffer_pointer(self) -> int:
            raise AssertionError("waited for an array that is not ready")

    pending, device = Computed(), jax.local_devices()[0]
    monkeypatch.setattr(device_memory, "_POINTERS_WAIT", True)
    monkeypatch.setattr(jax, "live_arrays", lambda: [pending])
    monkeypatch.setattr(device_memory, "_shards", lambda _: [(device, pending)])
    assert bytes_in_use(jax.local_devices()) == [800, *[0] * 7]


def test_other_errors_of_the_thread_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(devices: object) -> list[int]:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("the backend is gone")
        return [0]

    monkeypatch.setattr(device_memory, "bytes_in_use", broken)
    with pytest.raises(RuntimeError, match="the backend is gone"), DevicePeak():
        time.sleep(6 * SAMPLE_S)


def test_slow_measurements_are_made_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(devices: object) -> list[int]:
        measurements.append(None)
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return [0]

    measurements: list[None] = []
    monkeypatch.setattr(device_memory, "bytes_in_use", slow)
    with DevicePeak():
        time.sleep(0.5)  # a measurement of 20 ms may come every 2 s
    assert len(measurements) == 2


class Accelerator:
    """Device that counts its memory: each measurement gets the next number of `in_use`, then always the last."""

    def __init__(self, peak_before: int, peak_after: int, in_use: list[int]) -> None:
        self.peak, self.peak_after, self.in_use = peak_before, peak_after, in_use

    def memory_stats(self) -> dict[str, int]:
        stats = {"bytes_in_use": self.in_use[0], "peak_bytes_in_use": self.peak}
        if len(self.in_use) > 1:
            self.in_use.pop(0)
        return stats


@pytest.mark.parametrize(
    ("peak_after", "expected"),
    [(1000, 70), (1500, 1500)],
    ids=["an older peak stands: what was seen", "the peak rose: the backend's own"],
)
def test_memory_statistics_of_the_backend_are_used(
    monkeypatch: pytest.MonkeyPatch, peak_after: int, expected: int
) -> None:
    device = Accelerator(1000, peak_after, [10, 20, 70, 30])
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    with DevicePeak() as peak:
        time.sleep(6 * SAMPLE_S)
        device.peak = device.peak_after
    assert peak.bytes == expected
