"""What one pool may cost: all layouts of its roles on a number of devices, less those that cannot win."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jaxrlhf.config import ROLLOUT, Layout
from jaxrlhf.parallel.cost import Decoding, generation_cost, move_cost
from jaxrlhf.parallel.cost import decoding as fit_decoding
from jaxrlhf.parallel.layouts import generation_layouts, pool_sizes, training_layouts
from jaxrlhf.parallel.memory import cache_bytes_per_token
from jaxrlhf.parallel.plan import Cost, Problem
from jaxrlhf.parallel.simulate import Simulated, pool_hardware, simulate, simulate_rollout
from jaxrlhf.parallel.workload import Role


@dataclass(frozen=True, slots=True)
class Generation:
    """How a pool generates.

    Attributes:
      cache_bytes: Of the responses that one device decodes together.
      move: Of the weights from the actor's pool; None where they are there.
    """

    role: str
    how: Decoding
    cache_bytes: float
    cost: Cost
    move: Cost | None


@dataclass(frozen=True, slots=True)
class Point:
    """One pool on one number of devices, with one layout for each role.

    Attributes:
      seconds: Of each stage, generate, prepare, update.
      chosen: By role, in the order of `roles`.
      generation: None where the pool does not generate.
    """

    roles: tuple[str, ...]
    devices: int
    seconds: tuple[float, float, float]
    chosen: tuple[Simulated, ...]
    generation: Generation | None


@dataclass(frozen=True, slots=True)
class _Partial:
    """Layouts for some roles of a pool."""

    prepare_s: float
    update_s: float
    idle_bytes: float
    excess_bytes: float
    chosen: tuple[Simulated, ...]

    @property
    def key(self) -> tuple[float, ...]:
        """What another one has to be no worse in to replace this one."""
        return self.prepare_s, self.update_s, self.idle_bytes, self.excess_bytes


class PoolOptions:
    """Simulates the roles of a problem, each once for every layout, with one choice of what is offloaded.

    Attributes:
      simulated: Layouts of a role that were simulated.
    """

    def __init__(self, problem: Problem, offload: tuple[str, ...]) -> None:
        self._problem, self._offload = problem, offload
        self._roles = {role.name: role for role in problem.roles}
        self._generator = next((role for role in problem.roles if role.generates), None)
        self._usable_bytes = problem.hardware.memory_bytes * problem.hardware.usable_memory
        self._role_options: dict[tuple[str, int, bool], list[Simulated]] = {}
        self._partials: dict[tuple[tuple[str, ...], int], list[_Partial]] = {}
        self._all_points: dict[tuple[str, ...], list[Point]] = {}
        self._generations: dict[tuple[int, Layout, Decoding], Cost] = {}
        self.simulated = 0

    def all_points(self, roles: tuple[str, ...]) -> list[Point]:
        """Points of a pool on every size, without those that another one beats with no more devices."""
        if roles not in self._all_points:
            kept: list[Point] = []
            for devices in pool_sizes(self._problem.hardware):
                for point in self.points(roles, devices):
                    if not any(_no_worse(other.seconds, point.seconds) for other in kept):
                        kept.append(point)
            self._all_points[roles] = kept
        return self._all_points[roles]

    def points(self, roles: tuple[str, ...], devices: int) -> list[Point]:
        """Points of a pool on one number of devices; none of them beats another in every stage."""
        generator = self._generator
        if generator is None or not self._generates(roles):
            return _undominated(
                Point(roles, devices, (0.0, part.prepare_s, part.update_s), part.chosen, None)
                for part in self._partial(roles, devices)
            )
        name = ROLLOUT if generator.name not in roles else generator.name
        others = tuple(role for role in roles if role not in (generator.name, ROLLOUT))
        return _undominated(self._generating(name, others, devices))

    def _generates(self, roles: Sequence[str]) -> bool:
        """Whether a pool generates: the rollout's where that is apart or may be, else the actor's."""
        pools = self._problem.pools
        apart = self._problem.rollout_apart if pools is None else any(ROLLOUT in names for names, _ in pools)
        assert self._generator is not None
        return (ROLLOUT if apart else self._generator.name) in roles

    def _generating(self, name: str, others: tuple[str, ...], devices: int) -> Iterator[Point]:
        """Every choice for the role that generates with every choice for the others."""
        problem, generator = self._problem, self._generator
        assert generator is not None
        move = None
        hardware = pool_hardware(problem.hardware, devices)
        for own in self._options(name, devices, generates=True):
            for part in self._partial(others, devices):
                idle = part.idle_bytes + own.idle_bytes
                if idle + max(part.excess_bytes, own.excess_bytes) > self._usable_bytes:
                    continue
                room = self._usable_bytes - part.idle_bytes - own.generating_bytes
                how = fit_decoding(generator.model, own.layout, devices, room, problem.workload, problem.software)
                if how is None:
                    continue
                cost = self._generation_cost(devices, own.layout, how)
                if name == ROLLOUT:
                    source = problem.hardware.devices - devices
                    if source < 1:
                        continue
                    move = move_cost(generator.model, source, own.layout, devices, problem.software, hardware)
                generate_s = own.stage_s("generate") + cost.seconds + (move.seconds if move else 0.0)
                seconds = (
                    generate_s,
                    own.stage_s("prepare") + part.prepare_s,
                    own.stage_s("update") + part.update_s,
                )
                per_token = cache_bytes_per_token(generator.model, own.layout, itemsize=problem.software.compute_bytes)
                cached = how.at_once * problem.workload.longest_tokens * per_token
                generation = Generation(name, how, cached, cost, move)
                yield Point((name, *others), devices, seconds, (own, *part.chosen), generation)

    def _generation_cost(self, devices: int, layout: Layout, how: Decoding) -> Cost:
        replica = Layout(generation_stage=layout.generation_stage, generation_tensor=layout.generation_tensor)
        key = (devices, replica, how)
        if key not in self._generations:
            assert self._generator is not None
            problem, hardware = self._problem, pool_hardware(self._problem.hardware, devices)
            self._generations[key] = generation_cost(
                self._generator.model, layout, how, problem.workload, problem.software, hardware
            )
        return self._generations[key]

    def _partial(self, roles: tuple[str, ...], devices: int) -> list[_Partial]:
        """Layouts for roles that do not generate here, one role added after another."""
        if not roles:
            return [_Partial(0.0, 0.0, 0.0, 0.0, ())]
        key = (roles, devices)
        if key not in self._partials:
            *before, last = roles
            merged = [
                _Partial(
                    part.prepare_s + own.stage_s("prepare"),
                    part.update_s + own.stage_s("update"),
                    part.idle_bytes + own.idle_bytes,
                    max(part.excess_bytes, own.excess_bytes),
                    (*part.chosen, own),
                )
                for part in self._partial(tuple(before), devices)
                for own in self._options(last, devices, generates=False)
            ]
            fitting = [part for part in merged if part.idle_bytes + part.excess_bytes <= self._usable_bytes]
            self._partials[key] = undominated(fitting, [part.key for part in fitting])
        return self._partials[key]

    def _options(self, name: str, devices: int, *, generates: bool) -> list[Simulated]:
        """All layouts of one role that fit by themselves and that no other one beats."""
        key = (name, devices, generates)
        if key not in self._role_options:
            self._role_options[key] = self._simulate(name, devices, generates=generates)
        return self._role_options[key]

    def _simulate(self, name: str, devices: int, *, generates: bool) -> list[Simulated]:
        problem, offload = self._problem, self._offload
        role = self._roles.get(name) or self._generator
        assert role is not None
        found: dict[tuple[int, int], list[Simulated]] = {}
        for layout in self._layouts(role, name, devices, generates=generates):
            self.simulated += 1
            if name == ROLLOUT:
                option = simulate_rollout(problem, role, layout)
            else:
                option = simulate(problem, role, layout, devices, offload, generates=generates)
            if option.idle_bytes + option.excess_bytes <= self._usable_bytes:
                found.setdefault((layout.generation_stage, layout.generation_tensor), []).append(option)
        # Layouts are compared only with those that generate alike: what generation takes depends on other roles.
        return [option for group in found.values() for option in undominated(group, [_key(own) for own in group])]

    def _layouts(self, role: Role, name: str, devices: int, *, generates: bool) -> Iterator[Layout]:
        problem = self._problem
        given = (problem.layouts or {}).get(role.name)
        if given is not None:
            yield from _filled(given, devices, rollout=name == ROLLOUT)
            return
        replicas = list(generation_layouts(role, devices, problem.hardware)) if generates else [(1, 1)]
        if name == ROLLOUT:
            trained: Iterable[Layout] = [Layout(data=1)]
        else:
            trained = training_layouts(role, devices, problem.hardware, fsdp=problem.fsdp)
        for layout in trained:
            for stage, tensor in replicas:
                yield Layout(layout.data, layout.fsdp, layout.stage, layout.tensor, stage, tensor)


def _filled(layouts: Iterable[Layout], devices: int, *, rollout: bool) -> Iterator[Layout]:
    """The given layouts that fill `devices` devices."""
    for layout in layouts:
        generation = layout.generation_stage * layout.generation_tensor
        copy = layout.fsdp * layout.stage * layout.tensor
        fills = rollout or (devices % copy == 0 and layout.data in (None, devices // copy))
        if fills and devices % generation == 0:
            sizes = (layout.fsdp, layout.stage, layout.tensor)
            yield Layout(devices // copy or 1, *sizes, layout.generation_stage, layout.generation_tensor)


def _key(own: Simulated) -> tuple[float, ...]:
    seconds = (own.stage_s("generate"), own.stage_s("prepare"), own.stage_s("update"))
    return (*seconds, own.idle_bytes, own.excess_bytes, own.generating_bytes)


_Item = TypeVar("_Item")


def undominated(items: Sequence[_Item], keys: Sequence[tuple[float, ...]]) -> list[_Item]:
    """The items whose keys no other's is at most in every place; of equal ones the first."""
    order = sorted(range(len(items)), key=lambda index: keys[index])
    kept: list[int] = []
    for index in order:
        if not any(_no_worse(keys[other], keys[index]) for other in kept):
            kept.append(index)
    return [items[index] for index in kept]


def _undominated(points: Iterable[Point]) -> list[Point]:
    found = list(points)
    return undominated(found, [point.seconds for point in found])


def _no_worse(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))
