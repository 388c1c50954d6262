"""Collectives between the devices of a machine and between machines, timed in every size of group."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrlhf.planner.measure.measure import climb, each_device, filled, fitting
from jaxrlhf.planner.measure.rate_fit import Sample, all_gather_sample, all_reduce_sample

Kind = Literal["all-reduce", "all-gather"]

SAMPLES: dict[Kind, Callable[[int, float, float], Sample]] = {
    "all-reduce": all_reduce_sample,
    "all-gather": all_gather_sample,
}
LINK_BYTES = (2**12, 2**16, 2**20, 2**24, 2**26)
NETWORK_BYTES = LINK_BYTES[:4]


def link_samples(devices: Sequence[jax.Device], *, memory_bytes: float, seconds: float) -> list[Sample]:
    """Groups of neighbours, from pairs up to all devices; all groups at once."""
    sizes = group_sizes(len(devices))
    found = []
    for group in sizes:
        grid = np.asarray(devices).reshape(-1, group)
        found += _samples(grid, fitting(LINK_BYTES, float, memory_bytes), seconds=seconds / len(sizes))
    return found


def network_samples(devices: Sequence[jax.Device]) -> list[Sample]:
    """Groups with one device of every process; all groups at once.

    Every process has to call this with the devices of all. Sizes and calls are fixed, so that
    all of them do the same.
    """
    processes = len({device.process_index for device in devices})
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    grid = np.asarray(ordered).reshape(processes, -1).T
    return _samples(grid, NETWORK_BYTES, seconds=None)


def group_sizes(devices: int) -> list[int]:
    """2, 4, 8, ... as far as they divide the devices, and all of them."""
    doubled = [size for size in (2 << step for step in range(devices.bit_length())) if devices % size == 0]
    return sorted({*doubled, devices})


def in_a_row(num_bytes: int) -> int:
    """Collectives in one program: more of the small ones, so that starting it does not count as their latency."""
    return max(2, min(32, 2**22 // num_bytes))


def collective_program(mesh: Mesh, kind: Kind, times: int) -> Callable[[jax.Array], jax.Array]:
    """Several collectives, one after another, of arrays `[devices, numbers]` over the axis `group`.

    An all-reduce leaves the mean. An all-gather collects the first part of every device's
    array, and puts the next device's part first in what it leaves.
    """
    group = mesh.shape["group"]

    def reduce(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "group") / group

    def gather(x: jax.Array) -> jax.Array:
        # A device that went on with its own part would need no other's, and the compiler might see it.
        part = x.shape[0] // group
        whole = jax.lax.all_gather(x[:part], "group", tiled=True)
        place = (jax.lax.axis_index("group") + 1) % group * part
        return jax.lax.dynamic_update_slice_in_dim(whole, jax.lax.dynamic_slice_in_dim(whole, place, part), 0, 0)

    once = reduce if kind == "all-reduce" else gather
    return each_device(mesh, lambda x: jax.lax.fori_loop(0, times, lambda _, kept: once(kept), x))


def _samples(grid: np.ndarray, sizes: Sequence[int], *, seconds: float | None) -> list[Sample]:
    """Both collectives; each row of the grid is a group."""
    group = grid.shape[1]
    mesh = Mesh(grid, ("apart", "group"), axis_types=(AxisType.Auto,) * 2)

    def numbers(num_bytes: int) -> int:
        return num_bytes // 4 // group * group

    def build(num_bytes: int, kind: Kind) -> Callable[[], Any]:
        held = filled(mesh, (numbers(num_bytes),), jnp.float32)
        program = collective_program(mesh, kind, in_a_row(num_bytes))
        return lambda: program(held)

    found = []
    for kind, sample in SAMPLES.items():
        times = climb(
            sizes,
            lambda num_bytes, kind=kind: build(num_bytes, kind),  # type: ignore[misc]
            work=lambda num_bytes: num_bytes * in_a_row(num_bytes),
            seconds=None if seconds is None else seconds / len(SAMPLES),
            fewest=2,
        )
        found += [sample(group, 4 * numbers(size), taken_s / in_a_row(size)) for size, taken_s in times]
    return found
