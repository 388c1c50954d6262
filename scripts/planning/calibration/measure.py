"""Measurement of device and link rates: matrix products, memory, transfers to the host, collectives.

All devices are busy at once. Every figure is the median of warm calls of a compiled program; sizes grow until the
next size would not fit into the figure's time or memory.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrlhf.config import Refusal
from jaxrlhf.resharding.offload import to_device, to_host

FEWEST, MOST = 3, 200  # smallest and largest number of timed calls
CALLS = 1 + FEWEST  # smallest number of calls of a figure; the first call compiles
ROW = 4096  # numbers that are added to one sum
ARRAYS_SHARE = 1 / 8  # largest share of a device's memory for arrays

MATMUL_WIDTHS = tuple(256 << step for step in range(7))
ARRAY_BYTES = tuple(2**20 << 2 * step for step in range(8))
HOST_BYTES = ARRAY_BYTES[:6]  # per device; the host has to hold the arrays of all devices


class Timed(NamedTuple):
    """Timing of one call: its size and its seconds."""

    size: int
    seconds: float


def timed(run: Callable[[], Any], *, seconds: float | None) -> float:
    """Return the median seconds of a call, after a first call that compiles.

    Args:
      run: Function to time; `timed` waits for the arrays that it returns.
      seconds: Duration of the measurement, with at least `FEWEST` calls. None makes exactly `FEWEST` calls, for several
        processes that have to make the same calls.
    """
    jax.block_until_ready(run())
    times: list[float] = []
    end = time.perf_counter() + (seconds or 0.0)
    while len(times) < FEWEST or (time.perf_counter() < end and len(times) < MOST):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def climb(
    sizes: Sequence[int],
    build: Callable[[int], Callable[[], Any]],
    *,
    work: Callable[[int], float],
    seconds: float | None,
    fewest: int = 1,
) -> list[Timed]:
    """Time sizes in order, as long as the next size is expected to fit into the seconds.

    Args:
      build: Function from a size to the call to time.
      work: Function from a size to a number that is proportional to the expected seconds of a call.
      seconds: Time for all sizes; None times every size.
      fewest: Number of sizes that are timed in any case.
    """
    found: list[Timed] = []
    end = time.perf_counter() + (seconds or 0.0)
    for size in sizes:
        if seconds is not None and len(found) >= fewest:
            expected = found[-1].seconds * work(size) / work(found[-1].size)
            if time.perf_counter() + CALLS * expected > end:
                break
        # Small sizes leave most of the time to large sizes.
        each = None if seconds is None else seconds / len(sizes) / 4
        found.append(Timed(size, timed(build(size), seconds=each)))
    return found


def device_memory_bytes(devices: Sequence[jax.Device]) -> float:
    """Return the memory of one device in bytes; CPU devices share the memory of the machine."""
    stats = devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(devices)


def dispatch_s(devices: Sequence[jax.Device], *, seconds: float) -> float:
    """Measure the seconds of starting a program over all devices that computes almost nothing."""
    mesh = _row_of(devices)
    one_each = filled(mesh, (1,), jnp.float32)
    program = jax.jit(lambda x: x + 1)
    return timed(lambda: program(one_each), seconds=seconds)


def matmul_flops_per_s(devices: Sequence[jax.Device], *, dtype: Any, memory_bytes: float, seconds: float) -> float:
    """Measure the FLOPs per second of one device: the best of several square products of 2 width^3 FLOPs each."""
    mesh = _row_of(devices)
    multiply = each_device(mesh, lambda x: x @ x)

    def build(width: int) -> Callable[[], Any]:
        # Random, because a GPU that multiplies zeros needs less power and runs faster.
        draw = lambda key: jax.random.normal(key, (width, width), dtype)[None].repeat(len(devices), 0)  # noqa: E731
        matrix = jax.jit(draw, out_shardings=_over(mesh))(jax.random.key(0))
        return lambda: multiply(matrix)

    widths = fitting(MATMUL_WIDTHS, lambda width: 2 * width**2 * jnp.dtype(dtype).itemsize, memory_bytes)
    found = climb(widths, build, work=lambda width: width**3, seconds=seconds)
    return max(2 * width**3 / each for width, each in found)


def memory_bytes_per_s(devices: Sequence[jax.Device], *, memory_bytes: float, seconds: float) -> float:
    """Measure the memory rate of one device in bytes per second, summing the rows of its largest array.

    Counts all numbers as read, and one number per row as written.
    """
    mesh = _row_of(devices)
    add = each_device(mesh, lambda x: x.sum(axis=-1))

    def build(num_bytes: int) -> Callable[[], Any]:
        rows = filled(mesh, (num_bytes // 4 // ROW, ROW), jnp.float32)
        return lambda: add(rows)

    size, each = climb(fitting(ARRAY_BYTES, float, memory_bytes), build, work=float, seconds=seconds)[-1]
    return size * (1 + 1 / ROW) / each


def host_bytes_per_s(devices: Sequence[jax.Device], *, memory_bytes: float, seconds: float) -> float:
    """Measure the host transfer rate of one device in bytes per second: geometric mean of offload and return."""
    mesh = _row_of(devices)
    rates: list[float] = []

    def build(num_bytes: int) -> Callable[[], Any]:
        held = filled(mesh, (num_bytes // 4,), jnp.float32)
        rates.clear()

        def there_and_back() -> Any:
            nonlocal held
            waiting, away = to_host(held)
            held, back = to_device(waiting)
            rates.append(num_bytes / math.sqrt(away.seconds * back.seconds))
            return held

        return there_and_back

    climb(fitting(HOST_BYTES, float, memory_bytes), build, work=float, seconds=seconds)
    return statistics.median(rates[1:])


def _row_of(devices: Sequence[jax.Device]) -> Mesh:
    return Mesh(np.asarray(devices), ("device",), axis_types=(AxisType.Auto,))


def _over(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def each_device(mesh: Mesh, function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Compile a program in which every device applies the function to its entry of the first dimension."""
    specs: Any = {"in_specs": PartitionSpec(mesh.axis_names), "out_specs": PartitionSpec(mesh.axis_names)}
    return jax.jit(jax.shard_map(lambda x: function(x[0])[None], mesh=mesh, **specs, check_vma=False))


def filled(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return an array of ones with an entry of this shape on each device."""
    return jax.jit(lambda: jnp.ones((mesh.size, *shape), dtype), out_shardings=_over(mesh))()


def fitting(sizes: Sequence[int], num_bytes: Callable[[int], float], memory_bytes: float) -> list[int]:
    """Return the sizes whose arrays fit into memory, and the smallest size in any case."""
    return [size for size in sizes if size == sizes[0] or num_bytes(size) <= memory_bytes * ARRAYS_SHARE]


# Links: latency and rate, fitted to collectives in groups of several sizes.

Kind = Literal["all-reduce", "all-gather"]

GRID, ZOOMS = 200, 8  # points of a grid search, and number of searches, each between the neighbors of the best point
BEYOND = 16  # factor beyond the sampled sizes in the search for the latency (in bytes); samples do not tell more


class RateSample(NamedTuple):
    """Timing of `steps` consecutive steps that move `num_bytes` in total."""

    steps: int
    num_bytes: float
    seconds: float


def ring_sample(kind: Kind, group: int, num_bytes: float, seconds: float) -> RateSample:
    """Return the sample of a collective that leaves `num_bytes` on each of g devices.

    An all-gather takes g - 1 steps and sends (g - 1) / g of the bytes; an all-reduce takes and sends twice that.

    Source: Thakur et al. 2005 (Optimization of collective communication operations in MPICH), sections 4.1 and 4.5.
    """
    steps = (2 if kind == "all-reduce" else 1) * (group - 1)
    return RateSample(steps, steps / group * num_bytes, seconds)


KINDS: tuple[Kind, ...] = ("all-reduce", "all-gather")
LINK_BYTES = (2**12, 2**16, 2**20, 2**24, 2**26)
NETWORK_BYTES = LINK_BYTES[:4]


def link_samples(devices: Sequence[jax.Device], *, memory_bytes: float, seconds: float) -> list[RateSample]:
    """Measure groups of neighboring devices, from pairs up to all devices; groups of one size run at once."""
    sizes = group_sizes(len(devices))
    found = []
    for group in sizes:
        grid = np.asarray(devices).reshape(-1, group)
        found += _samples(grid, fitting(LINK_BYTES, float, memory_bytes), seconds=seconds / len(sizes))
    return found


def network_samples(devices: Sequence[jax.Device]) -> list[RateSample]:
    """Measure groups with one device of every process; all groups run at once.

    Every process has to call this with the devices of all processes. Sizes and calls are fixed, so that all processes
    make the same calls.
    """
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    grid = np.asarray(ordered).reshape(len({device.process_index for device in devices}), -1).T
    return _samples(grid, NETWORK_BYTES, seconds=None)


def group_sizes(devices: int) -> list[int]:
    """Return the sizes of groups: powers of 2 from 2 that divide the number of devices, and all devices."""
    doubled = [size for size in (2 << step for step in range(devices.bit_length())) if devices % size == 0]
    return sorted({*doubled, devices})


def in_a_row(num_bytes: int) -> int:
    """Return the number of collectives in one program: more if they are small, to hide the start of the program."""
    return max(2, min(32, 2**22 // num_bytes))


def collective_program(mesh: Mesh, kind: Kind, times: int) -> Callable[[jax.Array], jax.Array]:
    """Compile `times` consecutive collectives of arrays `[devices, numbers]` over the axis `group`.

    An all-reduce results in the mean. An all-gather collects the first part of every device's array; its result has the
    next device's part first.
    """
    group = mesh.shape["group"]

    def gather(x: jax.Array) -> jax.Array:
        # If a device continued with its own part, it would need no other part, and the compiler could drop the gather.
        part = x.shape[0] // group
        whole = jax.lax.all_gather(x[:part], "group", tiled=True)
        place = (jax.lax.axis_index("group") + 1) % group * part
        return jax.lax.dynamic_update_slice_in_dim(whole, jax.lax.dynamic_slice_in_dim(whole, place, part), 0, 0)

    once = gather if kind == "all-gather" else lambda x: jax.lax.psum(x, "group") / group
    return each_device(mesh, lambda x: jax.lax.fori_loop(0, times, lambda _, kept: once(kept), x))


def _samples(grid: np.ndarray, sizes: Sequence[int], *, seconds: float | None) -> list[RateSample]:
    """Measure both kinds of collectives; each row of the grid is a group."""
    group = grid.shape[1]
    mesh = Mesh(grid, ("apart", "group"), axis_types=(AxisType.Auto,) * 2)
    numbers = {num_bytes: num_bytes // 4 // group * group for num_bytes in sizes}

    def build(kind: Kind, num_bytes: int) -> Callable[[], Any]:
        held = filled(mesh, (numbers[num_bytes],), jnp.float32)
        program = collective_program(mesh, kind, in_a_row(num_bytes))
        return lambda: program(held)

    found, each = [], None if seconds is None else seconds / len(KINDS)
    for kind in KINDS:
        times = climb(sizes, partial(build, kind), work=lambda size: size * in_a_row(size), seconds=each, fewest=2)
        found += [ring_sample(kind, group, 4 * numbers[size], taken_s / in_a_row(size)) for size, taken_s in times]
    return found


def fit_link(samples: Sequence[RateSample]) -> tuple[float, float]:
    """Fit `(latency_s, bytes_per_s)`, the latency of a step and the rate, to samples.

        t = steps * latency_s + num_bytes / bytes_per_s

    The fit minimizes the sum of |log(predicted / measured)|, so that microseconds count as much as milliseconds, and a
    single disturbed timing has little influence. Both constants are above 0.

    Raises:
      Refusal: There are fewer than two samples, or a sample has a number that is not above 0.
    """
    if len(samples) < 2 or any(min(sample) <= 0 for sample in samples):
        needed = "two or more samples with steps, bytes and seconds above 0"
        raise Refusal(f"two constants need {needed}, got {list(samples)}")
    each = [sample.num_bytes / sample.steps for sample in samples]
    low, high = math.log(min(each) / BEYOND), math.log(max(each) * BEYOND)
    # Search one unknown: log of the bytes that take as long as a step's latency. The rate follows from it.
    for _ in range(ZOOMS):
        width, start = (high - low) / GRID, low
        worth = min((start + index * width for index in range(GRID + 1)), key=lambda worth: _scale(samples, worth)[1])
        low, high = max(low, worth - width), min(high, worth + width)
    seconds_per_byte = math.exp(_scale(samples, worth)[0])
    return math.exp(worth) * seconds_per_byte, 1 / seconds_per_byte


def _scale(samples: Sequence[RateSample], worth: float) -> tuple[float, float]:
    """Return the log of the best seconds per byte, if a step's latency is worth exp(worth) bytes, and its fit error."""
    logs = [math.log(each.seconds / (each.steps * math.exp(worth) + each.num_bytes)) for each in samples]
    scale = statistics.median(logs)
    return scale, sum(abs(log - scale) for log in logs)
