"""One role with one layout on one pool: its calls in a step, and the bytes it holds in each of them."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from jaxrlhf.config import Layout, offloaded
from jaxrlhf.parallel.cost import (
    Decoding,
    batch_of,
    decoding,
    forward_cost,
    generation_cost,
    offload_cost,
    switch_cost,
    update_cost,
)
from jaxrlhf.parallel.hardware import Hardware
from jaxrlhf.parallel.memory import (
    inference_activation_bytes,
    training_activation_bytes,
    weights_generating,
    weights_held,
)
from jaxrlhf.parallel.plan import Cost, Problem, Verb
from jaxrlhf.parallel.workload import Role, Stage


@dataclass(frozen=True)
class Step:
    """One call of a role, and what the role holds on a device meanwhile."""

    stage: Stage
    verb: Verb
    cost: Cost
    held_bytes: float


@dataclass(frozen=True)
class Simulated:
    """A role on its pool.

    Attributes:
      steps: All calls but generation itself, which depends on the room that other roles leave.
      idle_bytes: Held on a device while none of the role's calls runs.
      generating_bytes: Held while it generates, cache not included.
      stage_s: Seconds of `steps` by stage.
    """

    layout: Layout
    steps: tuple[Step, ...]
    idle_bytes: float
    generating_bytes: float = 0.0

    def stage_s(self, stage: Stage) -> float:
        """Seconds of the calls in one stage."""
        return sum(step.cost.seconds for step in self.steps if step.stage == stage)

    @property
    def excess_bytes(self) -> float:
        """Most that a call needs beyond what is held idle."""
        held = [step.held_bytes for step in self.steps] + [self.generating_bytes]
        return max(held) - self.idle_bytes


def pool_hardware(hardware: Hardware, devices: int) -> Hardware:
    """The hardware as one pool of it sees it: made-up devices have the share of those that idle."""
    if not hardware.shared_compute or devices == hardware.devices:
        return hardware
    share = hardware.devices / devices
    return replace(
        hardware,
        matmul_flops_per_s=hardware.matmul_flops_per_s * share,
        memory_bytes_per_s=hardware.memory_bytes_per_s * share,
        link_bytes_per_s=hardware.link_bytes_per_s * share,
        network_bytes_per_s=hardware.network_bytes_per_s * share,
    )


def simulate(
    problem: Problem, role: Role, layout: Layout, devices: int, offload: Collection[str], *, generates: bool
) -> Simulated:
    """The calls of a role that trains or scores.

    Args:
      devices: Of its pool.
      offload: As in `Config.offload`.
      generates: The role also generates on this pool.
    """
    work, software = problem.workload, problem.software
    hardware = pool_hardware(problem.hardware, devices)
    held = weights_held(role.model, role.head, layout)
    parameters = held * (software.weight_bytes if role.trained else software.compute_bytes)
    optimizer = held * software.optimizer_bytes if role.trained else 0.0
    waits = [offloaded(offload, role.name, part) for part in ("parameters", "optimizer")]
    idle_parameters, idle_optimizer = parameters * (not waits[0]), optimizer * (not waits[1])
    brought, brought_all = parameters * waits[0], parameters * waits[0] + optimizer * waits[1]

    steps: list[Step] = []
    generating = 0.0
    if generates:
        copy = weights_generating(role.model, layout) * software.compute_bytes
        kept = 0.0 if software.trains_in_compute_dtype else idle_parameters
        generating = kept + copy + idle_optimizer
        during = copy + idle_optimizer + (0.0 if software.trains_in_compute_dtype else parameters)
        cost = switch_cost(role.model, layout, software, hardware)
        if cost.seconds:
            steps.append(Step("generate", "switch", cost, during))
        steps += _moved("generate", brought, hardware, during)
    if role.passes:
        working = _inference_bytes(problem, role, layout) + parameters + idle_optimizer
        cost = forward_cost(role, layout, work, software, hardware)
        steps += [Step("prepare", "infer", cost, working)] * role.passes
        steps += _moved("prepare", brought * role.passes, hardware, working)
    if role.trained:
        working = parameters + optimizer + held * software.gradient_bytes + _update_bytes(problem, role, layout)
        steps.append(Step("update", "update", update_cost(role, layout, work, software, hardware), working))
        steps += _moved("update", brought_all, hardware, working)
    return Simulated(layout, tuple(steps), idle_parameters + idle_optimizer, generating)


def simulate_rollout(problem: Problem, role: Role, layout: Layout) -> Simulated:
    """A pool that generates with weights sent by the actor; they stay there."""
    held = weights_generating(role.model, layout) * problem.software.compute_bytes
    return Simulated(layout, (), held, held)


def generated(
    problem: Problem, role: Role, layout: Layout, devices: int, room_bytes: float
) -> tuple[Decoding, Cost] | None:
    """Generation with `room_bytes` left for the cache on each device; None if not one response fits."""
    how = decoding(role.model, layout, devices, room_bytes, problem.workload, problem.software)
    if how is None:
        return None
    hardware = pool_hardware(problem.hardware, devices)
    return how, generation_cost(role.model, layout, how, problem.workload, problem.software, hardware)


def _moved(stage: Stage, num_bytes: float, hardware: Hardware, held_bytes: float) -> list[Step]:
    return [Step(stage, "offload", offload_cost(num_bytes, hardware), held_bytes)] if num_bytes else []


def _row_tokens(problem: Problem) -> int:
    return 0 if problem.software.skips_masked else problem.workload.longest_tokens


def _inference_bytes(problem: Problem, role: Role, layout: Layout) -> float:
    batch = batch_of(role, layout, problem.workload.responses, problem.workload, problem.software)
    return inference_activation_bytes(
        role.model,
        role.head,
        layout,
        tokens=batch.tokens / batch.parts,
        row_tokens=_row_tokens(problem),
        itemsize=problem.software.compute_bytes,
    ) + _gathered_bytes(problem, role, layout)


def _update_bytes(problem: Problem, role: Role, layout: Layout) -> float:
    work, software = problem.workload, problem.software
    batch = batch_of(role, layout, work.responses * work.epochs / work.updates, work, software)
    # One forward, one backward keeps at most one part for each stage; otherwise all of a microbatch.
    parts = batch.parts if software.pipeline_parts_per_stage is not None else min(batch.parts, layout.stage)
    return training_activation_bytes(
        role.model,
        role.head,
        layout,
        tokens=batch.tokens / batch.parts * parts,
        row_tokens=_row_tokens(problem),
        itemsize=software.compute_bytes,
        remat=role.remat,
    ) + _gathered_bytes(problem, role, layout)


def _gathered_bytes(problem: Problem, role: Role, layout: Layout) -> float:
    """Two layers' and the embedding's weights, whole but for tensor shards, where `fsdp` splits them."""
    if layout.fsdp == 1:
        return 0.0
    model = role.model
    layer = model.attention_parameters + model.mlp_parameters()
    table = model.vocab_size * model.hidden_size / layout.stage
    return (2 * layer + table) / layout.tensor * problem.software.compute_bytes
