"""Why nothing fits: which role lacks how many bytes, and what would help."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxrlhf.config import ROLLOUT, Layout
from jaxrlhf.parallel.layouts import role_layouts
from jaxrlhf.parallel.memory import cache_bytes_per_token
from jaxrlhf.parallel.plan import Problem
from jaxrlhf.parallel.simulate import Simulated, Simulator
from jaxrlhf.parallel.workload import Role

_MOST_TIMES = 1024


class _Need(NamedTuple):
    """The most bytes of a device that a role needs in the layout that needs least, and in which call."""

    num_bytes: float
    verb: str


def shortage(problem: Problem) -> str:
    """Sentences on what does not fit: a role by itself with everything else in host memory, or all of them together."""
    usable = problem.hardware.memory_bytes * problem.hardware.usable_memory
    everything = tuple(role.name for role in problem.roles)
    alone = {role: _least(problem, role, everything) for role in problem.roles}
    for role, need in alone.items():
        if need is None:
            return _no_layout(problem, role)
    worst, need = max(((role, need) for role, need in alone.items() if need is not None), key=lambda pair: pair[1])
    if need.num_bytes > usable:
        return _too_large(problem, worst, need, usable)
    kept = {role: _least(problem, role, problem.offloads[-1]) for role in problem.roles}
    worst, need = max(((role, need) for role, need in kept.items() if need is not None), key=lambda pair: pair[1])
    return (
        f"each role fits {_pool(problem, worst)} by itself with everything in host memory that is not in use, and no "
        f"placement fits them all: {worst.name} {need.verb} needs {_gib(need.num_bytes)} of the {_gib(usable)} of a "
        f"device that a plan may fill, and the others that share its devices need more than is left; "
        f"{_advice(problem)}"
    )


def _no_layout(problem: Problem, role: Role) -> str:
    given = (problem.layouts or {}).get(role.name)
    if given is None:
        return f"{role.name} has no layout on {_pool(problem, role)}; change the number of devices"
    return (
        f"the layout that is given for {role.name} does not fill {_pool(problem, role)}: "
        f"{' or '.join(_text(layout) for layout in given)}; change it, or leave it to the search"
    )


def _too_large(problem: Problem, role: Role, need: _Need, usable: float) -> str:
    return (
        f"{role.name} does not fit {_pool(problem, role)}: in the best layout, with everything in host memory that is "
        f"not in use, {role.name} {need.verb} needs {_gib(need.num_bytes)} on each device, "
        f"{_gib(need.num_bytes - usable)} more than the {_gib(usable)} that a plan may fill; "
        f"{_more_machines(problem, role, usable)}{_advice(problem)}"
    )


def _advice(problem: Problem) -> str:
    advice = []
    everything = {role.name for role in problem.roles}
    if not any(everything <= set(choice) for choice in problem.offloads):
        advice.append(f"offload={tuple(sorted(everything))} would free most")
    if not problem.fsdp:
        advice.append("fsdp layouts would split weights further")
    if any(role.trained and not role.remat for role in problem.roles):
        advice.append("remat=True would keep fewer activations")
    advice.append("fewer tokens_per_microbatch, shorter sequences, more devices or devices with more memory would help")
    return "; ".join(advice)


def _least(problem: Problem, role: Role, offload: Sequence[str]) -> _Need | None:
    """The need of a role on its pool, or on all devices; None without a layout."""
    devices = _devices(problem, role)
    if devices < 1:
        return None
    simulator = Simulator(problem)
    apart = any(ROLLOUT in roles for roles, _ in problem.pools or ())
    generates = role.generates and not apart
    found = [
        _need(problem, role, simulator.role(role, layout, devices, offload, generates=generates), generates=generates)
        for layout in role_layouts(problem, role, devices, generates=generates)
    ]
    return min(found, default=None)


def _need(problem: Problem, role: Role, own: Simulated, *, generates: bool) -> _Need:
    """In the call that needs most; a generating role has one response in its cache."""
    calls = [_Need(step.held_bytes, step.verb) for step in own.steps] + [_Need(own.idle_bytes, "idle")]
    if generates:
        one = cache_bytes_per_token(role.model, own.layout, itemsize=problem.software.compute_bytes)
        calls.append(_Need(own.generating_bytes + one * problem.workload.longest_tokens, "generate"))
    return max(calls)


def _more_machines(problem: Problem, role: Role, usable: float) -> str:
    """On how many times as many machines the role fits by itself; nothing where pools are given."""
    if problem.pools is not None:
        return ""
    times = 2
    while times <= _MOST_TIMES:
        machines = problem.hardware.machines * times
        larger = replace(problem, hardware=replace(problem.hardware, machines=machines))
        need = _least(larger, role, tuple(role.name for role in problem.roles))
        if need is not None and need.num_bytes <= usable:
            return f"{machines} machines of {problem.hardware.devices_per_machine} would do; "
        times *= 2
    return "no number of machines helps; "


def _devices(problem: Problem, role: Role) -> int:
    """Of the role's pool, or all."""
    pools = problem.pools or ()
    return next((devices for roles, devices in pools if role.name in roles), problem.hardware.devices)


def _pool(problem: Problem, role: Role) -> str:
    return f"{_devices(problem, role)} x {problem.hardware.name}"


def _text(layout: Layout) -> str:
    data = "rest" if layout.data is None else layout.data
    generation = f"generation {layout.generation_stage} x {layout.generation_tensor}"
    return f"data={data} x fsdp={layout.fsdp} x stage={layout.stage} x tensor={layout.tensor}, {generation}"


def _gib(number: float) -> str:
    return f"{number / 2**30:.3g} GiB"
