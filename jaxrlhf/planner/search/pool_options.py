"""Options of one pool: all layouts of its roles on a number of devices, without dominated options."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from jaxrlhf.config import ROLLOUT, Layout
from jaxrlhf.planner.cost.cost import Decoding, decoding, generation_cost, move_cost
from jaxrlhf.planner.cost.memory import CachePerSequence, cache_per_sequence
from jaxrlhf.planner.cost.simulate import Simulated, Simulator
from jaxrlhf.planner.plan import Cost, PlacementProblem
from jaxrlhf.planner.search.layouts import pool_sizes, role_layouts
from jaxrlhf.planner.workload import Role

Seconds = tuple[float, float, float]
"""Seconds of the stages: generate, prepare, update."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Generation on a pool: its rounds and cost.

    Attributes:
      cache_bytes: Bytes of the cache of the responses that one device decodes together.
      move: Cost of sending the weights from the actor's pool; None if the actor's pool generates.
      seconds: Seconds of generation and move.
    """

    role: str
    how: Decoding
    cache_bytes: float
    cost: Cost
    move: Cost | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Point:
    """Option of a pool: a number of devices, and a layout for each role.

    Attributes:
      seconds: Seconds of each stage.
      chosen: Simulated layout of each role, in the order of `roles`.
      generation: Generation on the pool; None if the pool does not generate.
    """

    roles: tuple[str, ...]
    devices: int
    seconds: Seconds
    chosen: tuple[Simulated, ...]
    generation: Generation | None


@dataclass(frozen=True)
class _Choices:
    """Combinations of layouts for some roles of a pool, K of them.

    Attributes:
      value_K4: Seconds of prepare, seconds of update, bytes held while idle, and the most bytes that a call needs in
        addition.
      index_KR: Indices into the options of each role.
    """

    value_K4: np.ndarray
    index_KR: np.ndarray

    def joined(self, options: Sequence[Simulated]) -> "_Choices":
        """Return the combinations with one more role."""
        own_M4 = np.array([(*own.seconds[1:], own.idle_bytes, own.excess_bytes) for own in options]).reshape(-1, 4)
        ways, more = len(self.value_K4), len(own_M4)
        old_J4, new_J4 = np.repeat(self.value_K4, more, axis=0), np.tile(own_M4, (ways, 1))
        value_J4 = old_J4 + new_J4
        value_J4[:, 3] = np.maximum(old_J4[:, 3], new_J4[:, 3])
        chosen_J1 = np.tile(np.arange(more), ways)[:, None]
        return _Choices(value_J4, np.hstack([np.repeat(self.index_KR, more, axis=0), chosen_J1]))

    def kept(self, rows: np.ndarray) -> "_Choices":
        return _Choices(self.value_K4[rows], self.index_KR[rows])


class PoolOptions:
    """Options of pools for one choice of offloading: simulates each layout of the problem's roles once.

    Attributes:
      simulated: Number of simulated layouts.
    """

    def __init__(self, simulator: Simulator, problem: PlacementProblem, offload: tuple[str, ...]) -> None:
        self._simulator, self._problem, self._offload = simulator, problem, offload
        self._generator = next((role for role in problem.roles if role.generates), None)
        self._generates = ROLLOUT
        if self._generator is not None and not problem.has_rollout_pool:
            self._generates = self._generator.name
        self._usable_bytes = problem.hardware.memory_bytes * problem.hardware.usable_memory
        self._generations: dict[tuple[str, int, tuple[int, ...], int], Generation] = {}
        self._options, self._ways = cache(self._simulate), cache(self._join)
        self.all_points = cache(self._points_of_all_sizes)
        self.simulated = 0

    def _points_of_all_sizes(self, roles: tuple[str, ...]) -> list[Point]:
        """Return the points of a pool over all sizes, without points dominated by a point with no more devices."""
        sizes = pool_sizes(self._problem.hardware, devices_per_host=self._problem.devices_per_host or 1)
        points = [point for devices in sizes for point in self.points(roles, devices)]
        values = np.array([(point.devices, *point.seconds) for point in points]).reshape(-1, 4)
        return [points[index] for index in undominated(values)]

    def points(self, roles: tuple[str, ...], devices: int) -> list[Point]:
        """Return the points of a pool on one number of devices, without points that are dominated in every stage."""
        if self._generates in roles:
            others = tuple(role for role in roles if role != self._generates)
            return self._generating(self._generates, others, devices)
        ways = self._ways(roles, devices)
        found = []
        for index in undominated(ways.value_K4[:, :2]):
            prepare_s, update_s = map(float, ways.value_K4[index, :2])
            chosen = self._chosen(roles, devices, ways.index_KR[index])
            found.append(Point(roles, devices, (0.0, prepare_s, update_s), chosen, None))
        return found

    def _generating(self, name: str, others: tuple[str, ...], devices: int) -> list[Point]:
        """Return the points of a generating pool: M layouts of the generating role, K combinations of other roles."""
        options, ways = self._options(name, devices, True), self._ways(others, devices)
        if not options or not len(ways.value_K4):
            return []
        prepare_K, update_K, idle_K, excess_K = ways.value_K4.T
        cache_M2 = np.array([self._cache(own.layout) for own in options])
        own_M6 = np.array([(*own.seconds, own.idle_bytes, own.excess_bytes, own.generating_bytes) for own in options])
        generate_M, prepare_M, update_M, idle_M, excess_M, generating_M = own_M6.T
        held_MK = idle_M[:, None] + idle_K + np.maximum(excess_M[:, None], excess_K)
        sharing_M = np.array([own.layout.slot_devices for own in options])
        prompts_M = -(-self._problem.workload.prompts * sharing_M // devices)
        room_MK = self._usable_bytes - idle_K - generating_M[:, None]
        fit_MK = CachePerSequence(*cache_M2.T[:, :, None]).fitting(room_MK, prompts=prompts_M[:, None])
        own_J, way_J = np.nonzero((held_MK <= self._usable_bytes) & (fit_MK >= 1))
        if not len(own_J):
            return []
        responses = self._problem.workload.responses
        number: dict[tuple[int, ...], int] = {}
        alike_M = np.array([number.setdefault(_replica(own.layout), len(number)) for own in options])
        most_M = -(-responses * sharing_M // devices)
        fit_J = np.minimum(fit_MK[own_J, way_J], most_M[own_J]).astype(np.int64)
        key_J = alike_M[own_J] * (responses + 1) + fit_J
        _, first, inverse_J = np.unique(key_J, return_index=True, return_inverse=True)
        generations = [self._generation(name, options[own_J[j]].layout, int(fit_J[j]), devices) for j in first]
        generate_J = generate_M[own_J] + np.array([generation.seconds for generation in generations])[inverse_J]
        prepare_J, update_J = prepare_M[own_J] + prepare_K[way_J], update_M[own_J] + update_K[way_J]
        seconds_J3 = np.stack([generate_J, prepare_J, update_J], axis=1)
        found = []
        for index in undominated(seconds_J3):
            chosen = (options[own_J[index]], *self._chosen(others, devices, ways.index_KR[way_J[index]]))
            generate_s, prepare_s, update_s = map(float, seconds_J3[index])
            found.append(
                Point(
                    (name, *others), devices, (generate_s, prepare_s, update_s), chosen, generations[inverse_J[index]]
                )
            )
        return found

    def _cache(self, layout: Layout) -> CachePerSequence:
        """Return the bytes of the cache per sequence of the longest length, times the number of copies."""
        assert self._generator is not None
        work, software = self._problem.workload, self._problem.software
        prompt, response = cache_per_sequence(self._generator.model, layout, work, software)
        return CachePerSequence(prompt * software.cache_copies, response * software.cache_copies)

    def _generation(self, name: str, layout: Layout, fit: int, devices: int) -> Generation:
        """Return the generation by a layout with room for `fit` responses in a replica's cache."""
        key = (name, devices, _replica(layout), fit)
        if key not in self._generations:
            problem, generator = self._problem, self._generator
            assert generator is not None
            work, software = problem.workload, problem.software
            hardware = self._simulator.hardware(devices)
            how = decoding(layout, devices, fit, work)
            cost = generation_cost(generator.model, layout, how, work, software, hardware)
            move = None
            if name == ROLLOUT:
                senders = next(size for roles, size in problem.pools or () if generator.name in roles)
                move = move_cost(generator.model, senders, layout, devices, software, problem.hardware)
            cached = self._cache(layout).of(how.at_once, prompts=-(-work.prompts // how.replicas))
            self._generations[key] = Generation(name, how, cached, cost, move, cost.seconds + (move or Cost()).seconds)
        return self._generations[key]

    def _join(self, roles: tuple[str, ...], devices: int) -> _Choices:
        """Return the combinations of layouts of roles that do not generate here, without dominated combinations."""
        if not roles:
            return _Choices(np.zeros((1, 4)), np.zeros((1, 0), np.int64))
        merged = self._ways(roles[:-1], devices).joined(self._options(roles[-1], devices, False))
        fitting = merged.kept(merged.value_K4[:, 2:].sum(axis=1) <= self._usable_bytes)
        return fitting.kept(undominated(fitting.value_K4))

    def _chosen(self, roles: tuple[str, ...], devices: int, index_R: np.ndarray) -> tuple[Simulated, ...]:
        return tuple(self._options(role, devices, False)[index] for role, index in zip(roles, index_R, strict=True))

    def _simulate(self, name: str, devices: int, generates: bool) -> list[Simulated]:
        """Return all layouts of one role that fit alone and are not dominated."""
        found: dict[tuple[int, ...], list[Simulated]] = {}
        options = simulated_layouts(self._simulator, self._problem, name, devices, self._offload, generates=generates)
        for option in options:
            self.simulated += 1
            if option.idle_bytes + option.excess_bytes <= self._usable_bytes:
                found.setdefault(_replica(option.layout), []).append(option)
        # Compare only layouts with equal replicas: the seconds of generation depend on the memory of other roles.
        kept = []
        for group in found.values():
            value_K6 = [(*own.seconds, own.idle_bytes, own.excess_bytes, own.generating_bytes) for own in group]
            kept += [group[index] for index in undominated(np.array(value_K6))]
        return kept


def simulated_layouts(
    simulator: Simulator,
    problem: PlacementProblem,
    name: str,
    devices: int,
    offload: Sequence[str],
    *,
    generates: bool,
) -> Iterator[Simulated]:
    """Simulate a role on a pool in each of its layouts; `rollout` is the generating role on a separate pool."""
    role = role_named(problem, name)
    for layout in role_layouts(problem, role, devices, trains=name != ROLLOUT, generates=generates):
        if name == ROLLOUT:
            yield simulator.rollout(role, layout)
        else:
            yield simulator.role(role, layout, devices, offload, generates=generates)


def role_named(problem: PlacementProblem, name: str) -> Role:
    """Return the role of a name; `rollout` is the generating role."""
    return next(role for role in problem.roles if role.name == name or (name == ROLLOUT and role.generates))


def _replica(layout: Layout) -> tuple[int, ...]:
    """Return the generation layout: numbers of expert shards, position parts, stages and tensor shards."""
    return layout.expert, layout.generation_context, layout.generation_stage, layout.generation_tensor


def undominated(value_KD: np.ndarray) -> np.ndarray:
    """Return the indices, ascending, of rows that no other row beats or equals in every column.

    A smaller value is better. The first of equal rows is kept.
    """
    order = np.lexsort((np.arange(len(value_KD)), value_KD.sum(axis=1)))
    kept = []
    # A later row cannot dominate an earlier row: its sum is not smaller.
    while len(order):
        first, order = order[0], order[1:]
        kept.append(first)
        order = order[~(value_KD[first] <= value_KD[order]).all(axis=1)]
    return np.sort(np.array(kept, dtype=np.int64))
