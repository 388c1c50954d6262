"""Why nothing fits: which role lacks how many bytes, and what would help."""

from collections.abc import Sequence
from dataclasses import replace

from jaxrlhf.parallel.hardware import Hardware
from jaxrlhf.parallel.layouts import generation_layouts, training_layouts
from jaxrlhf.parallel.memory import cache_bytes_per_token
from jaxrlhf.parallel.plan import Problem
from jaxrlhf.parallel.simulate import Simulated, Simulator
from jaxrlhf.parallel.workload import Role

_MOST_MACHINES = 4096


def shortage(problem: Problem) -> str:
    """A sentence on what does not fit. Looks at each role alone on all devices first, then at all of them together."""
    everything = tuple(role.name for role in problem.roles)
    usable = problem.hardware.memory_bytes * problem.hardware.usable_memory
    alone = {role: _least(problem, role, problem.hardware, everything) for role in problem.roles}
    needs = {role: need for role, need in alone.items() if need is None or need[0] > usable}
    if needs:
        role = max(needs, key=lambda role: float("inf") if needs[role] is None else needs[role][0])  # type: ignore[index]
        return _one(problem, role, needs[role], usable)
    placed = {role: _least(problem, role, problem.hardware, problem.offloads[-1]) for role in problem.roles}
    held = {role: need for role, need in placed.items() if need is not None}
    worst, need = max(held.items(), key=lambda entry: entry[1][0])
    lacking = max(0.0, need[0] - usable)
    most = f"{worst.name} {need[1]} alone needs {_gib(need[0])} of {_gib(usable)} on each device"
    lack = f", {_gib(lacking)} more than there are" if lacking else ", and the roles that share its devices need more"
    return (
        f"each role fits {_devices(problem.hardware)} by itself with everything else offloaded, and no placement fits "
        f"them all: {most}{lack}; {_help(problem, offload=True)}"
    )


def _one(problem: Problem, role: Role, need: tuple[float, str] | None, usable: float) -> str:
    hardware = problem.hardware
    if need is None:
        return (
            f"{role.name} has no layout on {_devices(hardware)}: its {role.model.num_layers} layers, "
            f"{role.model.num_heads} heads and {role.model.num_kv_heads} key-value heads do not split evenly over "
            f"any pool that is allowed; change the number of devices"
        )
    enough = _machines_that_fit(problem, role, usable)
    more = f"{enough} machines of {hardware.devices_per_machine} would do" if enough else "no number of machines helps"
    return (
        f"{role.name} does not fit {_devices(hardware)}: in the best layout, all else offloaded, {role.name} "
        f"{need[1]} needs {_gib(need[0])} on each device, {_gib(need[0] - usable)} more than the "
        f"{_gib(usable)} a plan may fill; {more}, {_help(problem, offload=False)}"
    )


def _help(problem: Problem, *, offload: bool) -> str:
    advice = []
    everything = {role.name for role in problem.roles}
    if offload and not any(everything <= set(choice) for choice in problem.offloads):
        advice.append(f"offload={tuple(sorted(everything))} would free most")
    if not problem.fsdp:
        advice.append("fsdp layouts would split weights further")
    if any(role.trained and not role.remat for role in problem.roles):
        advice.append("remat=True would keep fewer activations")
    advice.append("fewer tokens_per_microbatch, shorter sequences, more devices or devices with more memory")
    return "; ".join(advice)


def _least(problem: Problem, role: Role, hardware: Hardware, offload: Sequence[str]) -> tuple[float, str] | None:
    """The fewest bytes of each device that the role needs on all devices, and in which call; None without a layout."""
    here = replace(problem, hardware=hardware)
    simulator = Simulator(here)
    best: tuple[float, str] | None = None
    for layout in training_layouts(role, hardware.devices, hardware, fsdp=problem.fsdp):
        within, replicas = problem.devices_per_host, [(1, 1)]
        if role.generates:
            replicas = list(generation_layouts(role, hardware.devices, hardware, within=within))
        for stage, tensor in replicas:
            whole = replace(layout, generation_stage=stage, generation_tensor=tensor)
            own = simulator.role(role, whole, hardware.devices, offload, generates=role.generates)
            need = _need(here, role, own)
            best = need if best is None else min(best, need)
    return best


def _need(problem: Problem, role: Role, own: Simulated) -> tuple[float, str]:
    """The most bytes of any call, one response in the cache, and which call it is."""
    calls = [(step.held_bytes, step.verb) for step in own.steps]
    found: list[tuple[float, str]] = [*calls, (own.idle_bytes, "idle")]
    if role.generates:
        one = cache_bytes_per_token(role.model, own.layout, itemsize=problem.software.compute_bytes)
        found.append((own.generating_bytes + one * problem.workload.longest_tokens, "generate"))
    return max(found)


def _machines_that_fit(problem: Problem, role: Role, usable: float) -> int | None:
    """The smallest power of two of machines on which the role fits by itself."""
    machines = 2 * problem.hardware.machines
    while machines <= _MOST_MACHINES:
        hardware = replace(problem.hardware, machines=machines)
        need = _least(problem, role, hardware, tuple(role.name for role in problem.roles))
        if need is not None and need[0] <= usable:
            return machines
        machines *= 2
    return None


def _devices(hardware: Hardware) -> str:
    return f"{hardware.devices} x {hardware.name}"


def _gib(number: float) -> str:
    return f"{number / 2**30:.1f} GiB"
