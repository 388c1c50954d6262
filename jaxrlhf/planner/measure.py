"""Rates of devices and links: matrix products, memory, transfers to the host, collectives.

All devices are busy at once. Every figure is the median of warm calls of a compiled program; sizes grow until the
next one would not fit into the time or the memory that the figure is given.
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

FEWEST, MOST = 3, 200  # timed calls
CALLS = 1 + FEWEST  # calls that a figure takes at least; the first one compiles
ROW = 4096  # numbers that go into one sum
ARRAYS_SHARE = 1 / 8  # share of a device's memory that arrays take at most

MATMUL_WIDTHS = tuple(256 << step for step in range(7))
ARRAY_BYTES = tuple(2**20 << 2 * step for step in range(8))
HOST_BYTES = ARRAY_BYTES[:6]  # for each device; the host has to hold them all


class Timed(NamedTuple):
    """A size and how long one call with it took."""

    size: int
    seconds: float


def timed(run: Callable[[], Any], *, seconds: float | None) -> float:
    """Median seconds of a call, after a first one that compiles.

    Args:
      run: Returns arrays that are waited for.
      seconds: Calls go on for as long, but for a few at least; None makes just those few, as do several processes
        that have to call together.
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
    """Time one size after another, as long as the next is expected to fit into the seconds.

    Args:
      build: Gives the call to time for a size.
      work: Gives the number that the seconds of a call grow with.
      seconds: Time for all sizes; None takes every size.
      fewest: Sizes that are timed whatever they take.
    """
    found: list[Timed] = []
    end = time.perf_counter() + (seconds or 0.0)
    for size in sizes:
        if seconds is not None and len(found) >= fewest:
            expected = found[-1].seconds * work(size) / work(found[-1].size)
            if time.perf_counter() + CALLS * expected > end:
                break
        # The small ones leave most of the time to the large ones.
        each = None if seconds is None else seconds / len(sizes) / 4
        found.append(Timed(size, timed(build(size), seconds=each)))
    return found


def device_memory_bytes(devices: Sequence[jax.Device]) -> float:
    """Memory of one device; CPU devices share the machine's."""
    stats = devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(devices)


def dispatch_s(devices: Sequence[jax.Device], *, seconds: float) -> float:
    """Seconds of a program over all devices that computes next to nothing."""
    mesh = _row_of(devices)
    one_each = filled(mesh, (1,), jnp.float32)
    program = jax.jit(lambda x: x + 1)
    return timed(lambda: program(one_each), seconds=seconds)


def matmul_flops_per_s(devices: Sequence[jax.Device], *, dtype: Any, memory_bytes: float, seconds: float) -> float:
    """FLOPs per second of one device, by the best of several square products: 2 width^3 operations each."""
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
    """Bytes per second of one device that sums the rows of its largest array: all read, a number a row written."""
    mesh = _row_of(devices)
    add = each_device(mesh, lambda x: x.sum(axis=-1))

    def build(num_bytes: int) -> Callable[[], Any]:
        rows = filled(mesh, (num_bytes // 4 // ROW, ROW), jnp.float32)
        return lambda: add(rows)

    size, each = climb(fitting(ARRAY_BYTES, float, memory_bytes), build, work=float, seconds=seconds)[-1]
    return size * (1 + 1 / ROW) / each


def host_bytes_per_s(devices: Sequence[jax.Device], *, memory_bytes: float, seconds: float) -> float:
    """Bytes per second of one device, the geometric mean of the ways to the host and back that offloading takes."""
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
    """A program in which every device calls the function with its entry."""
    specs: Any = {"in_specs": PartitionSpec(mesh.axis_names), "out_specs": PartitionSpec(mesh.axis_names)}
    return jax.jit(jax.shard_map(lambda x: function(x[0])[None], mesh=mesh, **specs, check_vma=False))


def filled(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array of this shape for each device."""
    return jax.jit(lambda: jnp.ones((mesh.size, *shape), dtype), out_shardings=_over(mesh))()


def fitting(sizes: Sequence[int], num_bytes: Callable[[int], float], memory_bytes: float) -> list[int]:
    """The sizes whose arrays fit, the smallest in any case."""
    return [size for size in sizes if size == sizes[0] or num_bytes(size) <= memory_bytes * ARRAYS_SHARE]


# Links: latency and rate, fitted to collectives in every size of group.

Kind = Literal["all-reduce", "all-gather"]

GRID, ZOOMS = 200, 8  # points that are tried, and times that this is done between the neighbours of the best
BEYOND = 16  # factor outside the sampled sizes that a step may be worth in bytes: past that the samples could not tell


class RateSample(NamedTuple):
    """One timing of steps, one after another, that move `num_bytes` in all."""

    steps: int
    num_bytes: float
    seconds: float


def ring_sample(kind: Kind, group: int, num_bytes: float, seconds: float) -> RateSample:
    """Sample of a collective that leaves `num_bytes` on each of g devices.

    An all-gather takes g - 1 steps and sends (g - 1) / g of the bytes; an all-reduce takes and sends twice that.

    Source: Thakur et al. 2005 (Optimization of collective communication operations in MPICH), sections 4.1 and 4.5.
    """
    steps = (2 if kind == "all-reduce" else 1) * (group - 1)
    return RateSample(steps, steps / group * num_bytes, seconds)


KINDS: tuple[Kind, ...] = ("all-reduce", "all-gather")
LINK_BYTES = (2**12, 2**16, 2**20, 2**24, 2**26)
NETWORK_BYTES = LINK_BYTES[:4]


def link_samples(devices: Sequence[jax.Device], *, memory_bytes: float, seconds: float) -> list[RateSample]:
    """Samples of groups of neighbours, from pairs up to all devices; groups of one size run at once."""
    sizes = group_sizes(len(devices))
    found = []
    for group in sizes:
        grid = np.asarray(devices).reshape(-1, group)
        found += _samples(grid, fitting(LINK_BYTES, float, memory_bytes), seconds=seconds / len(sizes))
    return found


def network_samples(devices: Sequence[jax.Device]) -> list[RateSample]:
    """Samples of groups with one device of every process; all groups run at once.

    Every process has to call this with the devices of all; sizes and calls are fixed, so that all do the same.
    """
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    grid = np.asarray(ordered).reshape(len({device.process_index for device in devices}), -1).T
    return _samples(grid, NETWORK_BYTES, seconds=None)


def group_sizes(devices: int) -> list[int]:
    """Sizes of groups: 2, 4, 8, ... as far as they divide the devices, and all of them."""
    doubled = [size for size in (2 << step for step in range(devices.bit_length())) if devices % size == 0]
    return sorted({*doubled, devices})


def in_a_row(num_bytes: int) -> int:
    """Collectives in one program: more of the small ones, so that starting it does not count as their latency."""
    return max(2, min(32, 2**22 // num_bytes))


def collective_program(mesh: Mesh, kind: Kind, times: int) -> Callable[[jax.Array], jax.Array]:
    """Several collectives, one after another, of arrays `[devices, numbers]` over the axis `group`.

    An all-reduce leaves the mean. An all-gather collects the first part of every device's array, and puts the next
    device's part first in what it leaves.
    """
    group = mesh.shape["group"]

    def gather(x: jax.Array) -> jax.Array:
        # A device that went on with its own part would need no other's, and the compiler might see it.
        part = x.shape[0] // group
        whole = jax.lax.all_gather(x[:part], "group", tiled=True)
        place = (jax.lax.axis_index("group") + 1) % group * part
        return jax.lax.dynamic_update_slice_in_dim(whole, jax.lax.dynamic_slice_in_dim(whole, place, part), 0, 0)

    once = gather if kind == "all-gather" else lambda x: jax.lax.psum(x, "group") / group
    return each_device(mesh, lambda x: jax.lax.fori_loop(0, times, lambda _, kept: once(kept), x))


def _samples(grid: np.ndarray, sizes: Sequence[int], *, seconds: float | None) -> list[RateSample]:
    """Samples of both collectives; each row of the grid is a group."""
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
    """`(latency_s, bytes_per_s)`: the latency of a step and the rate that explain the samples best.

        t = steps * latency_s + num_bytes / bytes_per_s

    The sum of |log(predicted / measured)| is least, so that a sample of microseconds counts as much as one of
    milliseconds, and one disturbed timing does not carry the rest away. Both constants are above 0.

    Raises:
      Refusal: Fewer than two samples, or one that is not above 0.
    """
    if len(samples) < 2 or any(min(sample) <= 0 for sample in samples):
        needed = "two or more samples with steps, bytes and seconds above 0"
        raise Refusal(f"two constants need {needed}, got {list(samples)}")
    each = [sample.num_bytes / sample.steps for sample in samples]
    low, high = math.log(min(each) / BEYOND), math.log(max(each) * BEYOND)
    # One unknown: the bytes that would take as long as a step's latency. The rate then follows.
    for _ in range(ZOOMS):
        width, start = (high - low) / GRID, low
        worth = min((start + index * width for index in range(GRID + 1)), key=lambda worth: _scale(samples, worth)[1])
        low, high = max(low, worth - width), min(high, worth + width)
    seconds_per_byte = math.exp(_scale(samples, worth)[0])
    return math.exp(worth) * seconds_per_byte, 1 / seconds_per_byte


def _scale(samples: Sequence[RateSample], worth: float) -> tuple[float, float]:
    """log of the seconds per byte that fit best, where a step is worth exp(worth) bytes; and how badly they fit."""
    logs = [math.log(each.seconds / (each.steps * math.exp(worth) + each.num_bytes)) for each in samples]
    scale = statistics.median(logs)
    return scale, sum(abs(log - scale) for log in logs)
