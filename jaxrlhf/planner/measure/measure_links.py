"""Latency and rate of links and networks, fitted to collectives that are timed in every size of group."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrlhf.config import Refusal
from jaxrlhf.planner.measure.measure import climb, each_device, filled, fitting

Kind = Literal["all-reduce", "all-gather"]

ROUNDS = 60
"""Each narrows the search to about two thirds; this many reach the precision of a float."""

GRID = 200
BEYOND = 16
"""Factor outside the sampled sizes that a step may be worth in bytes: past that the samples could not tell."""


class RateSample(NamedTuple):
    """One timing of something that takes steps, one after another, and bytes.

    Attributes:
      num_bytes: In all steps.
    """

    steps: int
    num_bytes: float
    seconds: float


def all_reduce_sample(group: int, num_bytes: float, seconds: float) -> RateSample:
    """Sample of a ring all-reduce of `num_bytes` on each of g devices: 2 (g - 1) steps that send 2 (g - 1) / g of them.

    Source: Thakur et al. 2005 (Optimization of collective communication operations in MPICH), section 4.5.
    """
    return RateSample(2 * (group - 1), 2 * (group - 1) / group * num_bytes, seconds)


def all_gather_sample(group: int, num_bytes: float, seconds: float) -> RateSample:
    """Sample of a ring all-gather whose result is `num_bytes` on every device: g - 1 steps, (g - 1) / g of them sent.

    Source: Thakur et al. 2005, section 4.1.
    """
    return RateSample(group - 1, (group - 1) / group * num_bytes, seconds)


SAMPLES: dict[Kind, Callable[[int, float, float], RateSample]] = {
    "all-reduce": all_reduce_sample,
    "all-gather": all_gather_sample,
}
LINK_BYTES = (2**12, 2**16, 2**20, 2**24, 2**26)
NETWORK_BYTES = LINK_BYTES[:4]


def link_samples(devices: Sequence[jax.Device], *, memory_bytes: float, seconds: float) -> list[RateSample]:
    """Groups of neighbours, from pairs up to all devices; all groups at once."""
    sizes = group_sizes(len(devices))
    found = []
    for group in sizes:
        grid = np.asarray(devices).reshape(-1, group)
        found += _samples(grid, fitting(LINK_BYTES, float, memory_bytes), seconds=seconds / len(sizes))
    return found


def network_samples(devices: Sequence[jax.Device]) -> list[RateSample]:
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


def _samples(grid: np.ndarray, sizes: Sequence[int], *, seconds: float | None) -> list[RateSample]:
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


def fit_link(samples: Sequence[RateSample]) -> tuple[float, float]:
    """The latency of a step and the rate that explain the samples best.

        t = steps * latency_s + num_bytes / bytes_per_s

    The sum of |log(predicted / measured)| is least, so that a sample of microseconds counts as
    much as one of milliseconds, and one disturbed timing does not carry the rest away. Both
    constants are above 0.

    Returns:
      `(latency_s, bytes_per_s)`.

    Raises:
      Refusal: Fewer than two samples, or one that is not above 0.
    """
    if len(samples) < 2 or any(min(sample) <= 0 for sample in samples):
        raise Refusal(
            f"two constants need two or more samples with steps, bytes and seconds above 0, got {list(samples)}"
        )
    each = [sample.num_bytes / sample.steps for sample in samples]
    low, high = math.log(min(each) / BEYOND), math.log(max(each) * BEYOND)
    # One unknown: the bytes that would take as long as a step's latency. The rate then follows.
    width = (high - low) / GRID
    best = min((low + index * width for index in range(GRID + 1)), key=lambda worth: _misfit(samples, worth))
    worth = _least(samples, max(low, best - width), min(high, best + width))
    seconds_per_byte = math.exp(_scale(samples, worth))
    return math.exp(worth) * seconds_per_byte, 1 / seconds_per_byte


def _scale(samples: Sequence[RateSample], worth: float) -> float:
    """log of the seconds per byte that fit best."""
    return statistics.median(_log_ratio(sample, worth) for sample in samples)


def _misfit(samples: Sequence[RateSample], worth: float) -> float:
    scale = _scale(samples, worth)
    return sum(abs(_log_ratio(sample, worth) - scale) for sample in samples)


def _log_ratio(sample: RateSample, worth: float) -> float:
    return math.log(sample.seconds / (sample.steps * math.exp(worth) + sample.num_bytes))


def _least(samples: Sequence[RateSample], low: float, high: float) -> float:
    """Golden-section search. Source: Kiefer 1953 (Sequential minimax search for a maximum)."""
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(ROUNDS):
        near, far = high - golden * (high - low), low + golden * (high - low)
        if _misfit(samples, near) <= _misfit(samples, far):
            high = far
        else:
            low = near
    return (low + high) / 2
