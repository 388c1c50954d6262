"""Rates of devices when all of them are busy: matrix products, memory, the way to the host.

Every figure is the median of warm calls of a compiled program. Sizes grow until the next one
would not fit into the time or the memory that the figure is given.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrlhf.resharding.offload import to_device, to_host

FEWEST, MOST = 3, 200  # timed calls
CALLS = 1 + FEWEST  # that a figure takes at least; the first one compiles
ROW = 4096  # numbers that go into one sum
ROOM = 8  # arrays take this part of a device's memory at most

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
      seconds: Calls go on for as long, but for a few at least; None makes just those few, so
        that several processes which have to call together do.
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
      build: The call to time for a size.
      work: What the seconds of a call grow with.
      seconds: For all sizes; None takes every size.
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
    """The first dimension has an entry for each device."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def each_device(mesh: Mesh, function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """A program in which every device calls the function with its entry."""
    split = PartitionSpec(mesh.axis_names)
    return jax.jit(
        jax.shard_map(lambda x: function(x[0])[None], mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    )


def filled(mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array of this shape for each device."""
    return jax.jit(lambda: jnp.ones((mesh.size, *shape), dtype), out_shardings=_over(mesh))()


def fitting(sizes: Sequence[int], num_bytes: Callable[[int], float], memory_bytes: float) -> list[int]:
    """The sizes whose arrays fit, the smallest in any case."""
    return [size for size in sizes if size == sizes[0] or num_bytes(size) <= memory_bytes / ROOM]
