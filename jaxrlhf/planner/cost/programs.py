"""Expected bytes of each compiled program of a plan, and of everything else on its devices."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from jaxrlhf.config import ROLLOUT, Layout, Remat
from jaxrlhf.engine.prefill import CHUNK_TOKENS, PREFILL_TOKENS
from jaxrlhf.models.memory import inference_activation_bytes
from jaxrlhf.planner.cost.memory import bytes_per_weight, cache_bytes_per_token, cache_per_sequence, weights_generating
from jaxrlhf.planner.cost.simulate import RoleBytes, Simulator, held_bytes, inference_bytes, update_bytes
from jaxrlhf.planner.plan import PlacementPlan, PlacementProblem, PlannedPool
from jaxrlhf.planner.workload import Role

GENERATION = "generation"
"""Prefix of the names of the engine's programs."""


class Expected(NamedTuple):
    """Expected bytes of one program, on one device.

    Attributes:
      program: Bytes of arguments, temporaries and outputs; None if plans do not count the program, such as a small
        copy.
      beside: Bytes of everything else in the device's memory while the program runs.
      within: Parts of the program that `beside` counts already, such as weights during a switch to generation.
    """

    program: float | None
    beside: float
    within: Literal["nothing", "arguments", "arguments and outputs"] = "nothing"


class ExpectedPrograms:
    """Expected bytes of the programs of one plan."""

    def __init__(self, problem: PlacementProblem, plan: PlacementPlan) -> None:
        simulator = Simulator(problem)
        self._problem, self._plan = problem, plan
        self._roles: dict[str, Role] = {}
        for role in problem.roles:
            pool = self._pool(role.name)
            layout = pool.layouts[role.name]
            self._roles[role.name] = simulator.with_remat(role, layout, plan.offload, pool.devices)

    @property
    def remat(self) -> Mapping[str, Remat]:
        """Rematerialization of each trained role, with automatic settings resolved."""
        recomputed: Mapping[bool, Remat] = {False: "full", True: "offload"}
        roles = {name: role for name, role in self._roles.items() if role.trained}
        return {name: recomputed[role.offloads] if role.remat else "none" for name, role in roles.items()}

    def of(self, name: str) -> Expected:
        """Return the expected bytes of a program by its name, `role.program[sizes]`."""
        owner, _, program = name.partition(".")
        program = program.partition("[")[0]
        if owner == GENERATION:
            return self._of_generation(program)
        role = self._roles[owner]
        pool, held = self._pool(owner), self._held(owner)
        layout, idle = pool.layouts[owner], self._idle(self._pool(owner))
        parameters, optimizer, _ = held.idle(owner, self._plan.offload)
        gradient = held.gradients / 2
        if program == "forward":
            return Expected(held.parameters + inference_bytes(self._problem, role, layout), idle - parameters)
        if program == "gradient":
            needed = held.parameters + held.gradients + update_bytes(self._problem, role, layout)
            return Expected(needed, idle - parameters)
        if program == "optimizer update":
            return Expected(held.parameters + held.optimizer + gradient, idle - parameters - optimizer)
        if program == "to_generation":
            _, pool, beside, copy = self._generating()
            if owner in pool.roles and beside == idle:  # at the last leaf, all other copies exist already
                return Expected(None, idle + copy, "arguments and outputs")
            return Expected(None, idle, "arguments")
        known = {"zero gradient": gradient, "optimizer state": held.optimizer}
        return Expected(known.get(program), idle)

    def _generating(self) -> tuple[Role, PlannedPool, float, float]:
        """Return the generating role, its pool, and bytes of a device: without the generation weights, and of them."""
        software, quantize = self._problem.software, self._problem.workload.quantize
        generator = next(role for role in self._roles.values() if role.generates)
        name = ROLLOUT if any(ROLLOUT in pool.roles for pool in self._plan.pools) else generator.name
        pool = self._pool(name)
        weights = weights_generating(generator.model, pool.layouts[name])
        beside = self._idle(pool)
        if name == ROLLOUT:
            beside -= weights * software.compute_bytes
        elif quantize is None and (software.trains_in_compute_dtype or generator.lora is not None):
            beside -= self._held(name).parameters  # the role generates with its trained parameters
        each = bytes_per_weight(generator.model, generator.lora, itemsize=software.compute_bytes, quantize=quantize)
        return generator, pool, beside, weights * each

    def _of_generation(self, program: str) -> Expected:
        problem, software = self._problem, self._problem.software
        generator, pool, beside, copy = self._generating()
        layout = pool.layouts[ROLLOUT if ROLLOUT in pool.roles else generator.name]
        if program == "prefill":
            replicas = pool.devices // layout.slot_devices
            prompt = problem.workload.prompt_tokens
            tokens = max(prompt, min(PREFILL_TOKENS, problem.workload.prompts * prompt) / replicas)
            lanes = software.cache_lanes
            kept = tokens * cache_bytes_per_token(generator.model, layout, itemsize=software.compute_bytes, lanes=lanes)
            tokens = tokens if prompt <= PREFILL_TOKENS else CHUNK_TOKENS
            own = Layout(1, stage=layout.generation_stage, tensor=layout.generation_tensor)
            sizes = {"row_tokens": 0, "itemsize": software.compute_bytes}
            working = inference_activation_bytes(generator.model, "value", own, tokens=tokens, **sizes)
            return Expected(copy + kept + working, beside)
        if program == "decode":
            return Expected(copy + self._cache(generator, pool, layout), beside)
        return Expected(None, beside + copy, "arguments" if program == "unstack" else "nothing")

    def _cache(self, generator: Role, pool: PlannedPool, layout: Layout) -> float:
        """Return the cache bytes of all slots of a device, at their longest."""
        work, replicas = self._problem.workload, pool.devices // layout.slot_devices
        slots = -(-min(self._plan.slots or work.responses, work.responses) // replicas)
        cache = cache_per_sequence(generator.model, layout, work, self._problem.software)
        return cache.of(slots, prompts=-(-work.prompts // replicas))

    def _pool(self, name: str) -> PlannedPool:
        return next(pool for pool in self._plan.pools if name in pool.roles)

    def _held(self, name: str) -> RoleBytes:
        return held_bytes(self._roles[name], self._pool(name).layouts[name], self._problem.software)

    def _idle(self, pool: PlannedPool) -> float:
        """Return the bytes of the pool's roles that stay on a device between calls."""
        total = 0.0
        for name in pool.roles:
            if name == ROLLOUT:
                generator = next(role for role in self._roles.values() if role.generates)
                total += weights_generating(generator.model, pool.layouts[name]) * self._problem.software.compute_bytes
                continue
            total += sum(self._held(name).idle(name, self._plan.offload))
        return total
