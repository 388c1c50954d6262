"""Small placement problems with different best placements, and an exhaustive search."""

import functools
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import numpy as np

from jaxrlhf.config import ROLLOUT, Layout
from jaxrlhf.models.config import Experts, ModelConfig
from jaxrlhf.models.counts import weight_counts
from jaxrlhf.planner.cost.cost import decoding, generation_cost, move_cost
from jaxrlhf.planner.cost.memory import cache_bytes_per_token
from jaxrlhf.planner.cost.simulate import Simulator
from jaxrlhf.planner.hardware import Hardware
from jaxrlhf.planner.plan import Infeasible, PlacementProblem, SearchResult
from jaxrlhf.planner.search.layouts import generation_layouts, switches, training_layouts
from jaxrlhf.planner.search.mapping import search
from jaxrlhf.planner.workload import STAGES, Role, Software, Workload

ALL = 203  # more placements than any problem here has
Placement = frozenset[frozenset[str]]


class Exhaustive:
    """Exhaustive search: algorithm 1 of HybridFlow over all layouts, without pruning."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem, self.hardware = problem, problem.hardware
        self.simulator = Simulator(problem)
        self.usable = problem.hardware.memory_bytes * problem.hardware.usable_memory
        self.roles = {role.name: role for role in problem.roles}
        self.generator = next((role for role in problem.roles if role.generates), None)
        self.apart = ROLLOUT in [name for roles, _ in problem.pools or () for name in roles]
        self.ways = functools.cache(self._ways)

    def best(self) -> dict[Placement, float]:
        """Return the seconds of the fastest step of every placement that fits."""
        found = {}
        for placement in self.placements():
            ways = itertools.product(self.allocations(placement), self.problem.offloads)
            seconds = list(itertools.starmap(self.cheapest, ways))
            if min(seconds, default=math.inf) < math.inf:
                found[placement] = min(seconds)
        return found

    def placements(self) -> set[Placement]:
        """Return all placements: every assignment of roles to pools."""
        if self.problem.pools is not None:
            return {frozenset(frozenset(roles) for roles, _ in self.problem.pools)}
        names, found = [*self.roles], set()
        for pool_of in itertools.product(range(len(names)), repeat=len(names)):
            pools = (frozenset(n for n, p in zip(names, pool_of, strict=True) if p == pool) for pool in pool_of)
            found.add(frozenset(pools))
        groups = [set(group) for group in self.problem.together]
        return {pools for pools in found if all(any(group <= pool for pool in pools) for group in groups)}

    def allocations(self, placement: Placement) -> Iterator[tuple[tuple[frozenset[str], int], ...]]:
        """Yield all numbers of devices of the pools; some devices may be idle."""
        if self.problem.pools is not None:
            yield tuple((frozenset(roles), devices) for roles, devices in self.problem.pools)
            return
        machine, host = self.hardware.devices_per_machine, self.problem.devices_per_host or 1
        sizes = [machine * count for count in range(1, self.hardware.machines + 1)]
        parts = {2: [1], 3: [1], 4: [1, 2], 6: [1, 3], 8: [1, 2, 4]}  # of a machine: halves first, then thirds
        sizes += parts.get(machine, []) if self.hardware.machines > 1 else range(1, machine)
        for devices in itertools.product([n for n in sizes if n % host == 0], repeat=len(placement)):
            if sum(devices) <= self.hardware.devices:
                yield tuple(zip(sorted(placement, key=sorted), devices, strict=True))

    def cheapest(self, pools: tuple[tuple[frozenset[str], int], ...], offload: tuple[str, ...]) -> float:
        """Return the least seconds of a step: stages in order, pools in parallel, or in turns on one processor."""
        one_processor = self.hardware.shared_compute and self.hardware.machines == 1
        joined = np.add if one_processor else np.maximum
        step = np.zeros((1, 3))
        for roles, devices in pools:
            step = joined(step[:, None], self.ways(roles, devices, offload)[None]).reshape(-1, 3)
            step = np.unique(step, axis=0)
        return float(step.sum(axis=1).min(initial=math.inf))

    def _ways(self, names: frozenset[str], devices: int, offload: tuple[str, ...]) -> np.ndarray:
        """Return the seconds of the stages for all layouts of the roles of a pool that fit into memory."""
        generating = None
        if self.generator is not None:
            generates = (ROLLOUT if self.apart else self.generator.name) in names
            generating = (self.generator.name if self.generator.name in names else ROLLOUT) if generates else None
        order = sorted(names - {ROLLOUT} if generating != ROLLOUT else names)
        options = [self.options(name, devices, offload, generates=name == generating) for name in order]
        rows = np.array(list(itertools.product(*(range(len(own)) for own in options)))).reshape(-1, len(order))

        def table(value) -> np.ndarray:
            own = [np.array([value(option) for option in of_role], float) for of_role in options]
            return np.stack([column[rows[:, place]] for place, column in enumerate(own)], axis=1)

        if not len(rows):
            return np.zeros((0, 3))
        idle = table(lambda option: option.idle_bytes)
        most = table(lambda one: max([one.idle_bytes, one.loading_bytes, *(step.held_bytes for step in one.steps)]))
        others = idle.sum(axis=1, keepdims=True) - idle
        fits = (others + most <= self.usable).all(axis=1)
        stages = [
            table(lambda o, stage=stage: sum(s.cost.seconds for s in o.steps if s.stage == stage)) for stage in STAGES
        ]
        seconds = np.stack([stage.sum(axis=1) for stage in stages], axis=1)
        if generating is None:
            return seconds[fits]
        place = order.index(generating)
        for row in np.flatnonzero(fits):
            own = options[place][rows[row, place]]
            seconds[row, 0] += self.generation(own, self.usable - others[row, place], devices, moved=generating)
        return seconds[fits & np.isfinite(seconds).all(axis=1)]

    def options(self, name: str, devices: int, offload: tuple[str, ...], *, generates: bool) -> list:
        role = self.roles.get(name) or self.generator
        given = (self.problem.layouts or {}).get(role.name)
        hardware = self.hardware
        if hardware.machines == 1:  # pools of any size are inside the machine
            hardware = replace(hardware, devices_per_machine=devices)
        within = self.problem.devices_per_host or hardware.devices_per_machine
        if given is not None:
            # The given layouts split weights only over fsdp.
            pairs = [(own, devices // own.fsdp) for own in given if devices % own.fsdp == 0]
            wholes = [replace(own, data=data) for own, data in pairs if own.data in (None, data)]
            if name == ROLLOUT:  # the training layout does not matter
                wholes = list(given)
            if generates:
                replica = [own.generation_stage * own.generation_tensor for own in wholes]
                wholes = [own for own, size in zip(wholes, replica, strict=True) if devices % size == 0]
        else:
            replicas = [(1, 1)]
            if generates:
                replicas = list(generation_layouts(role, devices, hardware, within=within))
            wholes = [
                replace(own, generation_stage=stage, generation_tensor=tensor)
                for own in training_layouts(role, devices, hardware, fsdp=self.problem.fsdp)
                for stage, tensor in replicas
                if name == ROLLOUT or switches(own, stage, tensor, within=within)
            ]
        if name == ROLLOUT:
            return [self.simulator.rollout(role, own) for own in wholes]
        return [self.simulator.role(role, own, devices, offload, generates=generates) for own in wholes]

    def generation(self, own, room: float, devices: int, *, moved: str) -> float:
        """Return the seconds of generation with `room` bytes; infinite if the cache of one response does not fit."""
        work, software, model = self.problem.workload, self.problem.software, self.generator.model
        row = work.longest_tokens * cache_bytes_per_token(model, own.layout, itemsize=software.compute_bytes)
        fit = math.floor((room - own.generating_bytes) / (row * software.cache_copies))
        if fit < 1:
            return math.inf
        sizes = own.layout.expert, own.layout.generation_stage, own.layout.generation_tensor
        return self._generation(sizes, min(fit, work.responses), devices, moved == ROLLOUT)

    @functools.cache  # noqa: B019 - lives as long as the test
    def _generation(self, sizes: tuple[int, int, int], fit: int, devices: int, moved: bool) -> float:
        work, software, model = self.problem.workload, self.problem.software, self.generator.model
        layout = Layout(1, 1, 1, 1, *sizes[1:], expert=sizes[0])
        seen = self.hardware
        if devices <= seen.devices_per_machine:
            seen = replace(seen, machines=1)
        if seen.shared_compute:
            rates = ("matmul_flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", "network_bytes_per_s")
            share = max(1, self.hardware.devices_per_machine / devices)  # of the processor of a machine
            seen = replace(seen, **{name: getattr(seen, name) * share for name in rates})
        how = decoding(layout, devices, fit, work)
        seconds = generation_cost(model, layout, how, work, software, seen).seconds
        if moved:
            (source,) = [senders for roles, senders in self.problem.pools if self.generator.name in roles]
            seconds += move_cost(model, source, layout, devices, software, self.hardware).seconds
        return seconds


# Problems.

PLAIN = Software(
    unstacks_layers=False,
    cache_copies=1.0,
    decode_tokens_per_dispatch=None,
)
"""Software without copies and without overhead of program starts in generation."""
LEAN = replace(PLAIN, weight_bytes=2, pipeline_parts_per_stage=None, head_on_last_stage=True)
REAL = Software(decode_tokens_per_dispatch=2)
"""Software of the engine, for responses of a few tokens."""


def a_model(draw: random.Random, *, scale: int = 1) -> ModelConfig:
    heads, kv_heads = draw.choice([(1, 1), (2, 1), (2, 2), (4, 2)])
    vocab, hidden, layers = draw.choice([6, 8, 10]), draw.choice([5, 6, 10]), draw.choice([1, 2, 2, 3])
    return ModelConfig("llama", vocab, hidden * scale, 4 * scale, layers, heads, kv_heads, 2)


def roles_of(dataflow: str, draw: random.Random) -> tuple[Role, ...]:
    """Return the roles of an algorithm, with tiny models."""
    policy, judge = a_model(draw, scale=draw.choice([1, 2, 4])), a_model(draw, scale=draw.choice([1, 2, 4]))
    large = a_model(draw, scale=6)
    routed = replace(policy, hidden_size=policy.hidden_size // 5 * 8, experts=Experts(4, 2, 4))
    cut = {"remat": draw.random() < 0.5, "rows_per_microbatch": draw.choice([1, 2, 8])}
    cut["tokens_per_microbatch"] = draw.choice([None, 16, 40])
    actor = Role("actor", policy, "lm", generates=True, trained=True, passes=draw.choice([0, 1, 2]), **cut)
    critic = Role("critic", large if dataflow == "large critic" else policy, "value", trained=True, **cut)
    reference = Role("reference", policy, "lm", **cut)
    reward = Role("reward", judge, "score", within_machine=True)
    ppo = (actor, critic, reference, reward)
    return {
        "ppo": ppo,
        "grpo": (actor, reference),
        "remax": (actor, reference, replace(reward, passes=2)),
        "sft": (replace(actor, generates=False),),
        "large critic": ppo,
        "safe": (*ppo, replace(critic, name="cost_critic"), replace(reward, name="cost")),
        "mixture": tuple(replace(role, model=routed) for role in (actor, reference)),
        "judges": (actor, reference, *(replace(reward, name=f"reward_{n}", model=a_model(draw)) for n in (1, 2))),
    }[dataflow]


def machines_of(draw: random.Random, shape: tuple[int, int], roles: tuple[Role, ...]) -> Hardware:
    """Sample rates with which tiny models take fractions of a second, with different bottlenecks."""

    def about(low: float, high: float) -> float:
        return math.exp(draw.uniform(math.log(low), math.log(high)))

    state = sum(weight_counts(role.model, role.head).total * (16 if role.trained else 2) for role in roles)
    link = about(1e4, 1e8)
    slow = draw.random() < 0.25
    return Hardware(
        *(
            "made",
            *shape,
            about(0.8, 10) * state / (math.prod(shape) if draw.random() < 0.5 else 1) + about(2e3, 1.2e4),
        ),
        *(about(1e6, 1e8), about(1e5, 1e8), link, link * draw.choice([0.003, 0.1, 1.0]), about(1e4, 1e7)),
        *(about(1e-6, 1e-3), about(1e-6, 1e-2), about(1e-6, 1e-3), about(1e-3, 1) if slow else about(1e-6, 1e-2)),
        shared_compute=draw.random() < 0.15,
    )


def a_problem(seed: int, dataflow: str | None = None, shape: tuple[int, int] | None = None) -> PlacementProblem:
    draw = random.Random(seed)
    dataflow = dataflow or draw.choice(["grpo", "remax", "ppo", "ppo", "large critic", "judges"])
    shape = shape or draw.choice([(1, 2), (1, 4), (2, 2), (2, 3), (2, 4), (1, 8), (2, 1)])
    roles = roles_of(dataflow, draw)
    trained = [role.name for role in roles if role.trained]
    frozen = [role.name for role in roles if not role.trained]
    longest = draw.choice([10, 14])
    slots = draw.choice([None, None, 3])
    work = Workload(4, draw.choice([8, 12]), 4.0, draw.choice([3.5, 6.0]), longest, draw.choice([1, 2]), slots=slots)
    software = draw.choice([PLAIN, REAL, LEAN, replace(LEAN, cache_copies=2.5)])
    offloads = draw.choice([((),), ((), (f"{trained[0]}.optimizer",)), ((), tuple(frozen), (*trained, *frozen))])
    problem = PlacementProblem(
        roles, work, software, machines_of(draw, shape, roles), offloads, fsdp=draw.random() < 0.5
    )
    generates = any(role.generates for role in roles)
    if generates and software.trains_in_compute_dtype:  # memory has room for the cache of a few responses
        token = cache_bytes_per_token(roles[0].model, Layout(), itemsize=2)
        longest = 10 + int(problem.hardware.memory_bytes * draw.uniform(0.1, 0.4) / token)
        problem = replace(problem, workload=replace(work, longest_tokens=longest))
    count, machine = shape
    change = draw.choice(["nothing", "nothing", "pools", "pools", "together", "layouts", "pools", "hosts"])
    if change == "together":
        problem = replace(problem, together=((roles[0].name, roles[-1].name),))
    if change == "layouts":
        problem = replace(problem, layouts={roles[-1].name: (Layout(), Layout(fsdp=2), Layout(data=1))})
    if change == "pools" and generates:
        names, some = [role.name for role in roles], count * machine // 2
        parted = (names, [ROLLOUT]), ([ROLLOUT, *names[1:]], names[:1]), (names[1:], names[:1])
        one, other = draw.choice(parted)
        problem = replace(problem, pools=((tuple(one), count * machine - some), (tuple(other), some)))
    if change == "hosts" and machine % 2 == 0:
        problem = replace(problem, devices_per_host=2)
    return problem


def solve(problem: PlacementProblem) -> tuple[dict[Placement, float], SearchResult | None]:
    """Return seconds of each placement by the exhaustive search, and the search's result; None if nothing fits."""
    return Exhaustive(problem).best(), found_in(problem)


def found_in(problem: PlacementProblem) -> SearchResult | None:
    """Return the result of the search; None if nothing fits."""
    # The explanation of a refusal takes longer than the search, and has its own tests.
    with mock.patch("jaxrlhf.planner.search.mapping.explain_infeasible", return_value="nothing fits"):
        try:
            return search(problem, keep=ALL)
        except Infeasible:
            return None
