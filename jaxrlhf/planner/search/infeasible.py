"""Explanation of an infeasible problem: the role that lacks memory, the missing bytes, and changes that would help."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxrlhf.config import ROLLOUT, Layout
from jaxrlhf.planner.cost.memory import cache_bytes
from jaxrlhf.planner.cost.simulate import Simulator
from jaxrlhf.planner.hardware import gib
from jaxrlhf.planner.plan import PlacementProblem
from jaxrlhf.planner.search.layouts import pool_sizes
from jaxrlhf.planner.search.pool_options import role_named, simulated_layouts

_MOST_TIMES = 1024


class _Need(NamedTuple):
    """Need of a role: the most bytes of a device, and the call that needs them."""

    num_bytes: float
    verb: str


def explain_infeasible(problem: PlacementProblem) -> str:
    """Return sentences on what does not fit: a single role with everything else offloaded, or all roles together."""
    usable = problem.hardware.memory_bytes * problem.hardware.usable_memory
    everything, allowed = tuple(role.name for role in problem.roles), problem.offloads[-1]
    names = [*everything, *([ROLLOUT] * problem.has_rollout_pool)]
    for offload in (everything, allowed):
        needs: list[tuple[_Need, str]] = []
        for name in names:
            least = _least_need(problem, name, offload)
            if least is None:
                given = " or ".join(_text(layout) for layout in (problem.layouts or {})[role_named(problem, name).name])
                return (
                    f"the layout set for {name} does not fill {_pool(problem, name)}: {given}; change this layout, or "
                    "leave it to the search"
                )
            needs.append((least, name))
        need, name = max(needs)
        if need.num_bytes > usable:
            return (
                f"{name} does not fit {_pool(problem, name)}: in the best layout, with offload={offload}, {name} "
                f"{need.verb} needs {gib(need.num_bytes)} on each device, {gib(need.num_bytes - usable)} more "
                f"than the {gib(usable)} that a plan may fill; {_more_machines(problem, name, usable, offload)}"
                f"{_advice(problem)}"
            )
    return (
        f"each role alone fits {_pool(problem, name)} with offload={allowed}, but no placement fits all roles: {name} "
        f"{need.verb} needs {gib(need.num_bytes)} of the {gib(usable)} of a device that a plan may fill, and the "
        f"roles that share its devices need more than the rest; {_advice(problem)}"
    )


def _advice(problem: PlacementProblem) -> str:
    advice = []
    everything = {role.name for role in problem.roles}
    if not any(everything <= set(choice) for choice in problem.offloads):
        advice.append(f"offload={tuple(sorted(everything))} would free the most memory")
    if not problem.fsdp:
        advice.append("fsdp layouts would split weights further")
    if any(role.trained and role.remat is False for role in problem.roles):
        advice.append("remat='full' would keep fewer activations")
    advice.append("fewer tokens_per_microbatch, shorter sequences or devices with more memory would help")
    return "; ".join(advice)


def _least_need(
    problem: PlacementProblem, name: str, offload: Sequence[str], sizes: Iterable[int] | None = None
) -> _Need | None:
    """Return the smallest need of a role over all pool sizes and layouts; None if there is no layout.

    The cache of a generating role is counted with one response.

    Args:
      sizes: Sizes of pools to try; None tries all.
    """
    role, work, software = role_named(problem, name), problem.workload, problem.software
    simulator, generates = Simulator(problem), name == ROLLOUT or (role.generates and not problem.has_rollout_pool)
    needs = []
    for devices in _sizes(problem, name) if sizes is None else sizes:
        for own in simulated_layouts(simulator, problem, name, devices, offload, generates=generates):
            calls = [_Need(step.held_bytes, step.verb) for step in own.steps] + [_Need(own.idle_bytes, "idle")]
            if generates:
                tokens, itemsize = work.longest_tokens, software.compute_bytes
                each = cache_bytes(role.model, own.layout, tokens=tokens, itemsize=itemsize, lanes=software.cache_lanes)
                cached = own.generating_bytes + each * software.cache_copies
                calls.append(_Need(max(own.loading_bytes, cached), "generate"))
            needs.append(max(calls))
    return min(needs, default=None)


def _more_machines(problem: PlacementProblem, name: str, usable: float, offload: Sequence[str]) -> str:
    """Return a clause on the number of machines on which the role alone fits; empty if the problem fixes pools."""
    if problem.pools is not None:
        return ""
    times = 2
    while times <= _MOST_TIMES:
        machines = problem.hardware.machines * times
        larger = replace(problem, hardware=replace(problem.hardware, machines=machines))
        whole = {devices * times for devices in _sizes(problem, name)} & set(_sizes(larger, name))
        need = _least_need(larger, name, offload, sizes=sorted(whole))
        if need is not None and need.num_bytes <= usable:
            return f"{machines} machines of {problem.hardware.devices_per_machine} would suffice; "
        times *= 2
    return "more machines do not help; "


def _sizes(problem: PlacementProblem, name: str) -> list[int]:
    """Return the numbers of devices that the role's pool may have."""
    if problem.pools is None:
        return pool_sizes(problem.hardware, devices_per_host=problem.devices_per_host or 1)
    return [devices for roles, devices in problem.pools if name in roles]


def _pool(problem: PlacementProblem, name: str) -> str:
    return f"{_sizes(problem, name)[-1]} x {problem.hardware.name}"


def _text(layout: Layout) -> str:
    data = "rest" if layout.data is None else layout.data
    generation = f"generation {layout.generation_stage} x {layout.generation_tensor}"
    if layout.generation_context > 1:
        generation += f" x context {layout.generation_context}"
    more = "".join(f" x {name}={size}" for name in ("expert", "context") if (size := getattr(layout, name)) > 1)
    return f"data={data} x fsdp={layout.fsdp}{more} x stage={layout.stage} x tensor={layout.tensor}, {generation}"
