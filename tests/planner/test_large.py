"""A 70B decoder and a mixture of 235B, planned for a v5p-128 and 16 machines of 8 H100 or H200: no array is made.

What the planner says that a device holds is compared with a sum over the trees themselves, split as the rules say.
"""

import math
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from jaxrlhf import models
from jaxrlhf.config import Layout, load, override
from jaxrlhf.planner.hardware import hardware_of
from jaxrlhf.planner.plan import Infeasible
from jaxrlhf.planner.problem import question_of
from jaxrlhf.planner.search import layouts
from jaxrlhf.planner.search.mapping import search
from jaxrlhf.sharding.mesh import AXES
from jaxrlhf.sharding.rules import GENERATE, TRAIN, cast_shapes, check_divisible, shardings

GIB = 2**30
LLAMA, QWEN = "meta-llama/Llama-3.1-70B-Instruct", "Qwen/Qwen3-235B-A22B"
MACHINES = {"v5p-128": (64, 95 * GIB), "h100x16x8": (128, 80e9), "h200x16x8": (128, 141e9)}
"""Number of devices, and memory of a device; the name of a v5p slice counts cores, two for each chip."""
FILLED = 0.7
"""Share of a device's memory that plans may fill."""
WEIGHTS = {LLAMA: 70_553_706_496, QWEN: 235_093_634_560}
"""Number of weights in the checkpoint's files."""
NORMS = {LLAMA: 2 * 8192, QWEN: 2 * 4096 + 2 * 128}
"""Number of weights of one layer's norms."""
ROUTER = {LLAMA: 0, QWEN: 4096 * 128}
"""Number of weights of one layer's router."""

OPTIMIZER = optax.adamw(1e-6)
BFLOAT16 = jnp.dtype(jnp.bfloat16)


def a_run(path: str):
    """Return GRPO with a reference, with 1280 responses of up to 1024 tokens."""
    return override(load("grpo_gsm8k"), {"model.path": path, "actor.tokens_per_microbatch": 131_072})


SEVERAL = pytest.param((LLAMA, "h100x16x8"), marks=pytest.mark.slow)  # its tests are those of the others


@pytest.fixture(scope="module", params=[(LLAMA, "v5p-128"), SEVERAL, (QWEN, "h200x16x8")], ids="-".join)
def planned(request):
    """Return model, number of devices, memory of a device, problem and best plan."""
    name, machines = request.param
    config = a_run(name)
    problem = question_of(config, replace(hardware_of(config, machines), usable_memory=FILLED)).problem
    return name, *MACHINES[machines], problem, search(problem).plans[0]


def mesh_of(layout: Layout, devices: int, *, generates: bool = False) -> AbstractMesh:
    """Return the factored mesh, without devices."""
    stage, tensor, expert = layout.generation_stage, layout.generation_tensor, layout.expert
    if layout.refines:
        sizes = {"data": layout.data, "fsdp": layout.fsdp, "expert": expert, "stage": stage, "tensor": tensor}
        sizes |= {"micro_stage": layout.stage // stage, "micro_tensor": layout.tensor // tensor}
    elif generates:
        sizes = {"data": devices // (expert * stage * tensor), "expert": expert, "stage": stage, "tensor": tensor}
    else:
        sizes = {"data": layout.data, "fsdp": layout.fsdp, "expert": expert}
        sizes |= {"stage": layout.stage, "tensor": layout.tensor}
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    assert math.prod(shape) == devices
    return AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def ways(sharding: NamedSharding, dim: int) -> int:
    """Return the number of parts of a dimension."""
    names = sharding.spec[dim] if dim < len(sharding.spec) else None
    names = (names,) if isinstance(names, str) else names or ()
    return math.prod(sharding.mesh.shape[name] for name in names)


def held_bytes(shapes, layout) -> int:
    """Return the bytes of one device; every dimension splits evenly."""
    total = 0
    for leaf, sharding in zip(*map(jax.tree.leaves, (shapes, layout)), strict=True):
        for dim, size in enumerate(leaf.shape):
            assert size % ways(sharding, dim) == 0
        total += math.prod(size // ways(sharding, dim) for dim, size in enumerate(leaf.shape)) * leaf.dtype.itemsize
    return total


def trees(model, layout: Layout, devices: int):
    """Return shapes and shardings of the masters, and of the copy for generation."""
    dims, masters = models.param_dims(model, "lm"), models.param_shapes(model, "lm", jnp.float32)
    train, generate = mesh_of(layout, devices), mesh_of(layout, devices, generates=True)
    check_divisible(train, dims, masters, TRAIN, role="actor")
    check_divisible(generate, dims, masters, GENERATE, role="actor")
    copy = cast_shapes(dims, masters, dtype=BFLOAT16)
    return (masters, shardings(train, dims, TRAIN)), (copy, shardings(generate, dims, GENERATE))


def cache_bytes(model, plan, layout: Layout, devices: int) -> float:
    """Return the cache bytes of one device; a decode program copies half of the cache."""
    replica = layout.generation_stage * layout.generation_tensor
    each = math.ceil(plan.slots / (devices // replica))
    tree = jax.eval_shape(
        lambda: models.empty_cache(model, slots=each, capacity=1024, execution=models.Execution(BFLOAT16))
    )
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    return 1.5 * whole / (layout.generation_stage * min(layout.generation_tensor, model.num_kv_heads))


def test_it_fits_by_the_planner_and_by_the_trees(planned):
    name, devices, memory_bytes, problem, plan = planned
    [pool] = plan.pools
    model, layout = problem.roles[0].model, pool.layouts["actor"]
    assert ([role.name for role in problem.roles], pool.devices) == (["actor", "reference"], devices)
    (masters, train), (copy, generate) = trees(model, layout, devices)
    moments = jax.eval_shape(OPTIMIZER.init, masters)[0]

    def stays(part):
        """Return whether a part of a role is not offloaded."""
        return not {part, part.partition(".")[0]} & set(plan.offload)

    (_, reference), _ = trees(model, pool.layouts["reference"], devices)
    frozen = stays("reference.parameters") * held_bytes(copy, reference)
    weights = held_bytes(masters, train)
    two_moments = held_bytes(moments.mu, train) + held_bytes(moments.nu, train)
    # While it is updated there are a microbatch's gradient and the sum of all.
    updating = weights + two_moments + 2 * weights + frozen
    cache = cache_bytes(model, plan, layout, devices)
    idle = stays("actor.parameters") * weights + stays("actor.optimizer") * two_moments
    loaded = idle + held_bytes(copy, generate) + frozen
    # Before there is a cache, layers are taken apart: attention, and then one matrix of the MLP after another.
    layers, places = copy["layers"], generate["layers"]
    parts = [held_bytes(layers["attention"], places["attention"])]
    parts += [held_bytes(*each) for each in zip(*map(jax.tree.leaves, (layers["mlp"], places["mlp"])), strict=True)]
    loading, generating = loaded + max(parts), loaded + cache
    # Norm scales are divided over stages alone, and routers not over tensor shards.
    norms, routers, last = model.num_layers * NORMS[name], model.num_layers * ROUTER[name], model.hidden_size
    shards = layout.fsdp * layout.expert * layout.stage
    matrices = (WEIGHTS[name] - norms - routers - last) / (shards * layout.tensor)
    assert weights == 4 * (matrices + routers / shards + norms / layout.stage + last)
    # The planner splits these like everything else.
    close = {"abs": 8 * routers + 26 * (norms + last)}
    if pool.peak_during == "actor generate":
        assert pool.peak_bytes == pytest.approx(max(loading, generating), **close)
    else:
        assert max(updating, loading, generating) < pool.peak_bytes
    assert pool.peak_bytes <= problem.hardware.usable_memory * memory_bytes


def test_no_table_is_whole_on_any_device(planned):
    name, devices, _, problem, plan = planned
    layouts = plan.pools[0].layouts
    for role in problem.roles:
        layout = layouts[role.name]
        split = (
            layout.stage * layout.tensor * layout.fsdp * layout.expert,
            layout.generation_stage * layout.generation_tensor,
        )
        for (shapes, shards), expected in zip(trees(role.model, layout, devices), split, strict=True):
            for table in ("embed", "head"):
                assert shapes[table].shape == {LLAMA: (128_256, 8192), QWEN: (151_936, 4096)}[name]
                assert math.prod(ways(shards[table], dim) for dim in (0, 1)) == expected
        assert split[0] >= 4 and (split[1] > 1 or role.name == "reference")


@pytest.mark.parametrize(
    ("machines", "usable", "generates", "slower"),
    [("h200x16x8", 0.7, True, 1.2), ("h100x32x8", 0.7, False, 1.01)],
)
def test_a_mixture_is_planned_with_its_experts_divided_and_is_slower_without(machines, usable, generates, slower):
    """Generation takes 470 GB, and while layers are unstacked a third of the experts twice: too much for eight H100.

    With experts whole, H200 split each layer by more ways than it has key-value heads, which takes a fifth longer.
    """
    config = a_run(QWEN)
    problem = question_of(config, replace(hardware_of(config, machines), usable_memory=usable)).problem
    if not generates:
        actor, reference = problem.roles
        problem = replace(problem, roles=(replace(actor, generates=False), reference))
    divided = search(problem, keep=1).plans[0]
    layout = divided.pools[0].layouts["actor"]
    assert layout.expert > 1
    every_layout = layouts.training_layouts
    whole = mock.patch.object(
        layouts, "training_layouts", lambda *args, **kw: (one for one in every_layout(*args, **kw) if one.expert == 1)
    )
    with whole:
        assert search(problem, keep=1).plans[0].seconds > slower * divided.seconds


def test_copies_that_the_compiler_of_tpus_makes_leave_no_room_for_a_mixture_on_64_chips():
    """The cast weights of layers and the copied gradient take 22 GB of each chip."""
    config = a_run(QWEN)
    problem = question_of(config, replace(hardware_of(config, "v5p-128"), usable_memory=0.8)).problem
    actor, reference = problem.roles
    problem = replace(problem, roles=(replace(actor, generates=False), reference))
    with pytest.raises(Infeasible, match="actor update needs"):
        search(problem, keep=1)
    plain = replace(problem.software, compiler=None)
    assert search(replace(problem, software=plain), keep=1).plans
