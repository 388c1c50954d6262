"""Simulation of one role with one layout on one pool: its calls in a step, and the bytes that it holds in each call."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

from jaxrlhf.config import Layout, offloaded
from jaxrlhf.models.counts import weight_counts
from jaxrlhf.models.memory import (
    head_bytes,
    inference_activation_bytes,
    keeps_activations,
    mlp_numbers,
    training_activation_bytes,
    weights_held,
)
from jaxrlhf.planner.cost.batches import Batch, batch_of
from jaxrlhf.planner.cost.cost import forward_cost, offload_cost, switch_cost, update_cost
from jaxrlhf.planner.cost.exchanges import mixed_width
from jaxrlhf.planner.cost.memory import (
    bytes_per_weight,
    weights_generating,
    weights_trained,
    weights_unstacked,
    weights_unstacking,
)
from jaxrlhf.planner.hardware import Hardware
from jaxrlhf.planner.plan import Cost, PlacementProblem, Verb
from jaxrlhf.planner.workload import STAGES, Role, Software, Stage


@dataclass(frozen=True)
class SimulatedCall:
    """Call of a role, and the bytes that the role holds on a device during the call."""

    stage: Stage
    verb: Verb
    cost: Cost
    held_bytes: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """Simulated role on its pool.

    Attributes:
      steps: All calls except generation itself, which depends on the memory that other roles leave.
      seconds: Seconds of `steps` in each stage: generate, prepare, update.
      idle_bytes: Bytes held on a device while none of the role's calls runs.
      excess_bytes: Most bytes that a call needs in addition to `idle_bytes`.
      generating_bytes: Bytes held during generation, without the cache.
      loading_bytes: Bytes held before the cache exists, while layers are unstacked.
    """

    layout: Layout
    steps: tuple[SimulatedCall, ...]
    seconds: tuple[float, float, float]
    idle_bytes: float
    excess_bytes: float
    generating_bytes: float
    loading_bytes: float


def _simulated(
    layout: Layout, steps: Sequence[SimulatedCall], idle: float, generating: float, loading: float
) -> Simulated:
    generate_s, prepare_s, update_s = (
        sum(step.cost.seconds for step in steps if step.stage == stage) for stage in STAGES
    )
    most = max([generating, loading, *(step.held_bytes for step in steps)])
    return Simulated(layout, tuple(steps), (generate_s, prepare_s, update_s), idle, most - idle, generating, loading)


def pool_hardware(hardware: Hardware, devices: int) -> Hardware:
    """Return the hardware of one pool.

    A pool inside a machine has no network. Devices simulated on one processor also get the share of idle devices.
    """
    machines = 1 if devices <= hardware.devices_per_machine else hardware.machines
    share = max(1.0, hardware.devices_per_machine / devices) if hardware.shared_compute else 1.0
    return replace(
        hardware,
        machines=machines,
        matmul_flops_per_s=hardware.matmul_flops_per_s * share,
        memory_bytes_per_s=hardware.memory_bytes_per_s * share,
        link_bytes_per_s=hardware.link_bytes_per_s * share,
        network_bytes_per_s=hardware.network_bytes_per_s * share,
    )


class Simulator:
    """Simulator of the roles of one problem; the computation of a role is costed once for each training layout."""

    def __init__(self, problem: PlacementProblem) -> None:
        self._problem = problem
        self.hardware = cache(partial(pool_hardware, problem.hardware))
        self._computed: dict[tuple[str, bool | None, int, int, int, int, int, int], _Computed] = {}
        self._held: dict[tuple[str, Layout], RoleBytes] = {}

    def role(self, role: Role, layout: Layout, devices: int, offload: Sequence[str], *, generates: bool) -> Simulated:
        """Simulate a role that trains or scores, and may generate, on a pool that the layout fills."""
        software, hardware = self._problem.software, self.hardware(devices)
        role = self.with_remat(role, layout, offload, devices)
        held = self._held_bytes(role, layout)
        parameters, optimizer, gradients = held
        idle_parameters, idle_optimizer, _ = held.idle(role.name, offload)
        loaded = parameters - idle_parameters
        loaded_all = loaded + (optimizer - idle_optimizer)

        steps: list[SimulatedCall] = []
        generating = loading = 0.0
        if generates:
            quantize = self._problem.workload.quantize
            each = bytes_per_weight(role.model, role.lora, itemsize=software.compute_bytes, quantize=quantize)
            copy = weights_generating(role.model, layout) * each
            as_trained = quantize is None and (software.trains_in_compute_dtype or role.lora is not None)
            stays = copy + idle_optimizer + (0.0 if as_trained else idle_parameters)
            generating, loading = self._generating_bytes(role, layout, stays, each, shared=as_trained)
            during = copy + idle_optimizer + (0.0 if as_trained else parameters)
            switch = switch_cost(role.model, layout, software, hardware, quantize=quantize)
            if switch.seconds:
                steps.append(SimulatedCall("generate", "switch", switch, during))
            steps += _moved("generate", loaded, hardware, during)
        computed = self._compute(role, layout, hardware)
        if computed.forward is not None:
            working = computed.forward_bytes + parameters + idle_optimizer
            steps += [SimulatedCall("prepare", "infer", computed.forward, working)] * role.passes
            steps += _moved("prepare", loaded * role.passes, hardware, working)
        if computed.update is not None:
            working = computed.update_bytes + parameters + optimizer + gradients
            steps.append(SimulatedCall("update", "update", computed.update, working))
            steps += _moved("update", loaded_all, hardware, working)
        return _simulated(layout, steps, idle_parameters + idle_optimizer, generating, loading)

    def with_remat(self, role: Role, layout: Layout, offload: Sequence[str], devices: int) -> Role:
        """Return the role with the rematerialization that a run would choose if all roles shared the pool.

        If other roles are on other pools, the role has more memory than assumed. If JAX simulates devices on one
        processor, the role recomputes.
        """
        hardware = self.hardware(devices)
        if role.remat is not None:
            return role
        if hardware.shared_compute or not role.trained:
            return replace(role, remat=True)
        needed = update_bytes(self._problem, replace(role, remat=False), layout)
        needed += self._held_bytes(role, layout).gradients
        for other in self._problem.roles:
            held = self._held_bytes(other, layout)
            stays = held if other.name == role.name else held.idle(other.name, offload)
            needed += stays.parameters + stays.optimizer
        return replace(role, remat=not keeps_activations(needed, hardware.memory_bytes))

    def rollout(self, role: Role, layout: Layout) -> Simulated:
        """Simulate a pool that only generates; weights are sent by the actor and stay on the pool."""
        each = self._problem.software.compute_bytes
        held = weights_generating(role.model, layout) * each
        generating, loading = self._generating_bytes(role, layout, held, each, shared=role.lora is not None)
        return _simulated(layout, (), held, generating, loading)

    def _generating_bytes(
        self, role: Role, layout: Layout, held: float, each: float, *, shared: bool
    ) -> tuple[float, float]:
        """Return the bytes during generation, without a cache, and the bytes while the layers are unstacked.

        Args:
          held: Bytes with stacked layers.
          each: Bytes of a weight.
          shared: Whether the stack stays, because the stack or its adapters are also trained.
        """
        if not self._problem.software.unstacks_layers:
            return held, held
        if not shared:
            return held, held + weights_unstacking(role.model, layout) * each
        unstacked = held + weights_unstacked(role.model, layout) * each
        return unstacked, unstacked

    def _held_bytes(self, role: Role, layout: Layout) -> "RoleBytes":
        key = (role.name, layout)
        if key not in self._held:
            self._held[key] = held_bytes(role, layout, self._problem.software)
        return self._held[key]

    def _compute(self, role: Role, layout: Layout, hardware: Hardware) -> "_Computed":
        assert layout.data is not None
        sizes = layout.data, layout.fsdp, layout.stage, layout.tensor, layout.expert, layout.context
        key = (role.name, role.remat, *sizes)
        if key not in self._computed:
            problem = self._problem
            arguments = (role, layout, problem.workload, problem.software, hardware)
            self._computed[key] = _Computed(
                forward_cost(*arguments) if role.passes else None,
                inference_bytes(problem, role, layout) if role.passes else 0.0,
                update_cost(*arguments) if role.trained else None,
                update_bytes(problem, role, layout) if role.trained else 0.0,
            )
        return self._computed[key]


@dataclass(frozen=True, slots=True)
class _Computed:
    """Costs of a role's forward pass and update in one layout, and their bytes besides weights and gradients."""

    forward: Cost | None
    forward_bytes: float
    update: Cost | None
    update_bytes: float


class RoleBytes(NamedTuple):
    """Bytes of a role on one device: two parts that can be offloaded, and the gradients during an update."""

    parameters: float
    optimizer: float
    gradients: float

    def idle(self, role: str, offload: Sequence[str]) -> "RoleBytes":
        """Return the bytes that stay on the device while no call of the role runs: parts that are not offloaded."""
        stays = [not offloaded(offload, role, part) for part in ("parameters", "optimizer")]
        return RoleBytes(self.parameters * stays[0], self.optimizer * stays[1], 0.0)


def held_bytes(role: Role, layout: Layout, software: Software) -> RoleBytes:
    weights = weights_held(role.model, role.head, layout)
    if not role.trained:
        return RoleBytes(weights * software.compute_bytes, 0.0, 0.0)
    learnt = weights_trained(role.model, role.head, role.lora, layout)
    frozen = 0.0 if role.lora is None else weights
    each = bytes_per_weight(role.model, role.lora, itemsize=software.compute_bytes)
    gradients = 2 * learnt * software.gradient_bytes  # of a microbatch, and the sum
    return RoleBytes(
        frozen * each + learnt * software.weight_bytes, learnt * role.optimizer_bytes_with(software), gradients
    )


def _moved(stage: Stage, num_bytes: float, hardware: Hardware, held_bytes: float) -> list[SimulatedCall]:
    return [SimulatedCall(stage, "offload", offload_cost(num_bytes, hardware), held_bytes)] if num_bytes else []


def inference_bytes(problem: PlacementProblem, role: Role, layout: Layout) -> float:
    batch = batch_of(role, layout, problem.workload.responses, problem.workload, problem.software, largest=True)
    tokens, itemsize = batch.tokens / batch.parts, problem.software.compute_bytes
    layers_bytes, table_bytes = _gathered_bytes(problem, role, layout)
    sizes = {"row_tokens": 0, "itemsize": itemsize}  # attention keeps no scores
    in_layers = inference_activation_bytes(role.model, "value", layout, tokens=tokens, **sizes) + layers_bytes
    if layout.stage > 1:  # activations before and after the pipeline
        waiting = tokens * _parts_at_once(problem.software, layout, batch)
        in_layers += 2 * waiting * role.model.hidden_size * itemsize
    hidden = 2 * tokens * role.model.hidden_size * itemsize
    # The head runs after the last layer's weights and activations are freed.
    return max(in_layers, hidden + table_bytes + head_bytes(role.model, role.head, layout, tokens=tokens))


def update_bytes(problem: PlacementProblem, role: Role, layout: Layout) -> float:
    work, software = problem.workload, problem.software
    assert role.remat is not None, "the simulator sets remat first"
    batch = batch_of(role, layout, work.responses * work.epochs / work.updates, work, software, largest=True)
    parts = _parts_at_once(software, layout, batch)
    copied = software.compute_bytes * weights_trained(role.model, role.head, role.lora, layout)
    if role.lora is None:
        routed = weight_counts(role.model).experts / layout.copy_devices
        copied += (software.gradient_bytes - software.compute_bytes) * routed
    copied *= software.compiler == "tpu" and layout.width_shards > 1
    widened = (4 - software.compute_bytes) * mlp_numbers(role.model) / layout.tensor * (software.compiler == "tpu")
    return copied + training_activation_bytes(
        role.model,
        role.head,
        layout,
        tokens=batch.tokens / batch.parts * parts,
        remat=role.remat,
        idle_share=(layout.stage - 1) / parts if software.pipeline_parts_per_stage is not None else 0.0,
        gathered=_gathered_bytes(problem, role, layout),
        attended=mixed_width(role.model, layout) * batch.shares,
        offloads=role.offloads,
        widened=batch.tokens / batch.parts * widened,
        row_tokens=0,
        itemsize=software.compute_bytes,
    )


def _parts_at_once(software: Software, layout: Layout, batch: Batch) -> int:
    """Return the number of parts that a stage holds at once: all parts of a microbatch; with 1F1B one per stage."""
    return batch.parts if software.pipeline_parts_per_stage is not None else min(batch.parts, layout.stage)


def _gathered_bytes(problem: PlacementProblem, role: Role, layout: Layout) -> tuple[float, float]:
    """Return the bytes of gathered weights, of two layers and of the embedding; experts are not gathered over `expert`.

    The bytes of layers include the copies that compilers make of all layers before they run.
    """
    model, software = role.model, problem.software
    masters = software.weight_bytes if role.trained and role.lora is None else software.compute_bytes
    weights = weight_counts(model)
    cast = weights.layers / layout.copy_devices
    cast *= (software.compiler == "tpu" and masters != software.compute_bytes) * software.compute_bytes
    if layout.width_shards == 1:
        return cast, 0.0
    ordered = (weights.outputs + weights.experts * (layout.fsdp * layout.context > 1)) / layout.copy_devices
    ordered *= (software.compiler == "gpu") * masters
    mlp = weights.mlp - weights.experts * (1 - 1 / layout.expert)
    layer = weights.attention / model.num_layers + mlp / (model.num_layers - model.dense_layers)
    table = model.vocab_size * model.hidden_size / layout.stage
    each = problem.software.compute_bytes / layout.tensor
    return 2 * layer * each + cast + ordered, table * each
