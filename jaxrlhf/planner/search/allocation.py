"""Allocation of devices to pools: finds the distribution of devices with the fastest step."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from jaxrlhf.planner.hardware import Hardware
from jaxrlhf.planner.search.pool_options import Point, Seconds


@dataclass(frozen=True)
class Allocation:
    """Allocation: seconds of a step, and the chosen point of each pool, in the order of the pools."""

    seconds: float
    points: list[Point]


def stage_seconds(pools: Sequence[Seconds], *, shared: bool) -> list[float]:
    """Return the seconds of each stage: pools run side by side, or in turns if they share one processor.

    Source: HybridFlow (arXiv:2409.19256), d_cost of algorithm 1.
    """
    return [sum(stage) if shared else max(stage) for stage in zip(*pools, strict=True)]


def allocate(points: Sequence[Sequence[Point]], hardware: Hardware, *, within: float) -> tuple[Allocation | None, int]:
    """Choose a point for each pool, so that the step is fastest and the hardware has enough devices.

    Args:
      within: Upper limit of seconds; allocations that take as long or longer are ignored.

    Returns:
      The allocation, or None if there is none; and the number of points that were tried.
    """
    if any(not options for options in points):
        return None, 0
    order = sorted(range(len(points)), key=lambda place: len(points[place]))
    search = _BranchAndBound([points[place] for place in order], hardware, within)
    search.extend([], (0.0, 0.0, 0.0), hardware.devices)
    if search.best is None:
        return None, search.tried
    chosen = dict(zip(order, search.best, strict=True))
    return Allocation(search.limit, [chosen[place] for place in range(len(points))]), search.tried


class _BranchAndBound:
    """Branch-and-bound search for an allocation.

    A partial choice is pruned if a lower bound of its seconds is too long. In the lower bound each remaining pool takes
    the fewest seconds that are possible in each stage with all remaining devices.

    Attributes:
      best: Best choice so far; None before the first.
      limit: Seconds of the best choice; longer steps are ignored.
      tried: Number of points that were tried.
    """

    def __init__(self, pools: list[Sequence[Point]], hardware: Hardware, within: float) -> None:
        self._shared = hardware.takes_turns
        self._pools = [sorted(pool, key=lambda point: point.devices) for pool in pools]
        self._fewest = [pool[0].devices for pool in self._pools]
        self._least = [_least(pool) for pool in self._pools]
        self.best: list[Point] | None = None
        self.limit, self.tried = within, 0

    def extend(self, chosen: list[Point], so_far: Seconds, left: int) -> None:
        """Try every point of the next pool, the most promising first."""
        place = len(chosen)
        if place == len(self._pools):
            if sum(so_far) < self.limit:
                self.limit, self.best = sum(so_far), chosen
            return
        later = range(place + 1, len(self._pools))
        reserved = sum(self._fewest[other] for other in later)
        branches: list[tuple[float, int, Point, Seconds]] = []
        for point in self._pools[place]:
            if point.devices > left - reserved:
                break
            self.tried += 1
            joined = lower = self._join(so_far, point.seconds)
            for other in later:
                spare = left - point.devices - reserved + self._fewest[other]
                lower = self._join(lower, _at_most(self._least[other], spare))
            if sum(lower) < self.limit:
                branches.append((sum(lower), len(branches), point, joined))
        for lowest, _, point, joined in sorted(branches, key=lambda branch: branch[:2]):
            if lowest >= self.limit:
                break
            self.extend([*chosen, point], joined, left - point.devices)

    def _join(self, one: Seconds, other: Seconds) -> Seconds:
        if self._shared:
            return one[0] + other[0], one[1] + other[1], one[2] + other[2]
        return max(one[0], other[0]), max(one[1], other[1]), max(one[2], other[2])


def _least(points: Sequence[Point]) -> list[tuple[int, Seconds]]:
    """Return, for each number of devices, the fewest seconds of each stage with at most this number."""
    least: Seconds = (float("inf"),) * 3
    found = []
    for point in points:
        least = min(least[0], point.seconds[0]), min(least[1], point.seconds[1]), min(least[2], point.seconds[2])
        found.append((point.devices, least))
    return found


def _at_most(least: list[tuple[int, Seconds]], devices: int) -> Seconds:
    """Return the entry with the most devices up to `devices`; the first entry if there is no such entry."""
    return least[max(0, bisect.bisect_right(least, devices, key=lambda entry: entry[0]) - 1)][1]
