"""Layouts that a model can have on a number of devices."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

from jaxrlhf.config import Layout
from jaxrlhf.engine.prefill import CHUNK_PARTS, CHUNK_TOKENS
from jaxrlhf.models.config import ModelConfig, padded_rows
from jaxrlhf.models.lora.quantized import TILE
from jaxrlhf.planner.hardware import Hardware
from jaxrlhf.planner.plan import PlacementProblem
from jaxrlhf.planner.workload import Role

LONG_ROW_TOKENS = 8192
"""Length of the longest sequence from which on the search tries to split rows and caches; shorter rows fit a device."""

_WIDEST_TENSOR = 16
"""Largest number of tensor shards; with more, a device computes too little between two all-reduces on any link."""


def role_layouts(
    problem: PlacementProblem, role: Role, devices: int, *, trains: bool = True, generates: bool = False
) -> Iterator[Layout]:
    """Yield the layouts of a role on a pool: the problem's layouts that fill the pool, or else all layouts.

    Args:
      trains: Whether the role trains or scores on this pool; False if it only generates.
    """
    given = (problem.layouts or {}).get(role.name)
    if given is not None:
        yield from _filled(given, devices, trains=trains, generates=generates)
        return
    hardware = problem.hardware
    if hardware.machines == 1:  # pools cannot straddle machines, so a pool counts as a machine of its size
        hardware = replace(hardware, devices_per_machine=devices)
    within = problem.devices_per_host or hardware.devices_per_machine
    tiles = _in_tiles(problem, role)
    replicas = [(1, 1)]
    if generates:
        replicas = list(generation_layouts(role, devices, hardware, within=within, tiles=tiles))
    long = problem.workload.longest_tokens >= LONG_ROW_TOKENS
    rows = problem.fsdp and long
    how = {"fsdp": problem.fsdp, "context": rows and "rows" not in role.undivided, "tiles": tiles}
    own = training_layouts(role, devices, hardware, **how) if trains else [Layout(data=1)]
    for layout in own:
        for stage, tensor in replicas:
            shares = generates and long and "context" not in role.undivided
            for context in _shared_caches(role.model, stage, tensor, within) if shares else [1]:
                fills = devices % (context * stage * tensor) == 0
                if fills and switches(layout, stage, tensor, within=within, context=context):
                    generation = {"generation_stage": stage, "generation_tensor": tensor, "generation_context": context}
                    yield replace(layout, **generation)


def _filled(layouts: Iterable[Layout], devices: int, *, trains: bool, generates: bool) -> Iterator[Layout]:
    """Yield the layouts that fill `devices` devices, with `data` set."""
    for layout in layouts:
        copy = layout.copy_devices
        fills = not trains or (devices % copy == 0 and layout.data in (None, devices // copy))
        if fills and (not generates or devices % layout.replica_devices == 0):
            yield replace(layout, data=devices // copy or 1)


def divisors(number: int) -> list[int]:
    """Return all divisors, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def pool_sizes(hardware: Hardware, *, devices_per_host: int = 1) -> list[int]:
    """Return the numbers of devices that a pool may have; all are multiples of `devices_per_host`.

    On one machine a pool may have any number. On several machines a pool has whole machines, or an even part of a
    machine; each size below a machine divides the next larger size. Pools take devices in order, largest pool first, so
    a pool that spans machines fills them.
    """
    machine = hardware.devices_per_machine
    if hardware.machines == 1:
        return list(range(devices_per_host, machine + 1, devices_per_host))
    sizes = [machine * count for count in range(1, hardware.machines + 1)]
    while sizes[0] > 1:
        sizes.insert(0, sizes[0] // divisors(sizes[0])[1])
    return [size for size in sizes if size % devices_per_host == 0]


def training_layouts(
    role: Role, devices: int, hardware: Hardware, *, fsdp: bool, context: bool = False, tiles: bool = False
) -> Iterator[Layout]:
    """Yield the layouts that train or score a model on `devices` devices and split its dimensions evenly.

    Args:
      context: Whether rows may be split too, over at most as many devices as there are heads.
      tiles: Whether neighbors in a matrix share a quantization scale, so that a tile must stay on one device.

    Source: HybridFlow (arXiv:2409.19256), algorithm 2, with `fsdp`, `expert` and `context` added.
    """
    model, machine = role.model, hardware.devices_per_machine
    experts = divisors(model.experts.count) if model.experts else [1]
    stages, width = [1] if role.offloads else _stages(model), _parts(model.hidden_size, tiles)
    for tensor in _tensors(role, hardware, tiles):
        if devices % tensor:
            continue
        for stage in stages:
            copy = tensor * stage
            if devices % copy or padded_rows(model.vocab_size) % copy:
                continue
            left = devices // copy
            for shards in divisors(left) if fsdp else [1]:
                inside = machine % (copy * shards) == 0 or not role.within_machine
                if not inside or width % shards:
                    continue
                widest = model.num_heads // tensor if context and stage == 1 else 1
                for expert, split in product(experts, [n for n in divisors(shards) if n <= widest]):
                    if shards % (expert * split) == 0:
                        rows = {"data": left // shards, "fsdp": shards // (expert * split), "expert": expert}
                        yield Layout(**rows, stage=stage, tensor=tensor, context=split)


def generation_layouts(
    role: Role, devices: int, hardware: Hardware, *, within: int | None = None, tiles: bool = False
) -> Iterator[tuple[int, int]]:
    """Yield the stages and tensor shards of a replica that fits into one process.

    Args:
      within: Number of devices of a process; None is the number of devices of a machine.
    """
    stages, linear = [1] if "stage" in role.undivided else _stages(role.model), role.model.linear
    for tensor in _tensors(role, hardware, tiles):
        if linear is not None and linear.key_heads % tensor:
            continue
        for stage in stages:
            replica = tensor * stage
            fits = (within or hardware.devices_per_machine) % replica == 0 and devices % replica == 0
            if fits and padded_rows(role.model.vocab_size) % replica == 0:
                yield stage, tensor


def _shared_caches(model: ModelConfig, stage: int, tensor: int, within: int) -> list[int]:
    """Return the numbers of parts that a cache's positions may be split into.

    Only 1 with several stages, or if more tensor shards could still split the KV heads.
    """
    splits_heads = model.latent is None and tensor % model.num_kv_heads
    if stage > 1 or splits_heads:
        return [1]
    return [ways for ways in divisors(within // tensor) if (CHUNK_TOKENS // CHUNK_PARTS[0]) % ways == 0]


def switches(layout: Layout, stage: int, tensor: int, *, within: int, context: int = 1) -> bool:
    """Return whether a training layout can switch to generation replicas that are each inside a process.

    If training refines generation, the replicas that share a training copy are interleaved in the copy. So if a replica
    splits a dimension, the training split of this dimension must be inside one process.

    Args:
      stage, tensor, context: Numbers of parts of a generation replica.
      within: Number of devices of a process.
    """
    if layout.stage % stage or layout.tensor % tensor or layout.context % context:
        return within % (layout.expert * context * stage * tensor) == 0
    whole = layout.context * layout.stage * layout.tensor
    if layout.expert > 1:
        return within % (layout.expert * whole) == 0
    return (
        (context == 1 or whole <= within)
        and (stage == 1 or layout.stage * layout.tensor <= within)
        and (tensor == 1 or layout.tensor <= within)
    )


def _tensors(role: Role, hardware: Hardware, tiles: bool) -> list[int]:
    """Return the numbers of tensor shards; shards span machines only if the network is as fast as the links."""
    model, machine = role.model, hardware.devices_per_machine
    one_fabric = hardware.network_bytes_per_s >= hardware.link_bytes_per_s and not role.within_machine
    widest = min(hardware.devices, max(machine, _WIDEST_TENSOR)) if one_fabric else machine
    inner = model.intermediate_size if model.experts is None else model.experts.intermediate_size
    powers = [n for n in range(1, widest + 1) if machine % n == 0 or n % machine == 0]
    return [n for n in powers if model.num_heads % n == 0 and _parts(inner, tiles) % n == 0]


def _stages(model: ModelConfig) -> list[int]:
    """Return the numbers of stages.

    Layers with experts, with layer inputs, or that borrow from other layers are not divided. Layers of a repeating
    pattern of kinds are divided between repeats.
    """
    whole = model.experts is not None or model.borrowing_layers or model.layer_inputs is not None
    repeats, kinds = model.pattern
    return [1] if whole else divisors(repeats if len(kinds) > 1 else model.num_layers)


def _in_tiles(problem: PlacementProblem, role: Role) -> bool:
    """Return whether the role has quantized matrices, frozen or for generation, in which neighbors share a scale."""
    frozen = role.lora is not None and role.lora.quantize is not None
    return frozen or (role.generates and problem.workload.quantize is not None)


def _parts(width: int, tiles: bool) -> int:
    """Return the number of parts of a dimension that may be on different devices: single numbers, or tiles."""
    return width // math.gcd(TILE, width) if tiles else width
