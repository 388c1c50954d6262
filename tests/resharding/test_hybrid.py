"""Bytes that a switch of layouts moves: the paper's formula, the paper's groups, and the compiled programs."""

import math
from fractions import Fraction
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import collectives, joined, live_bytes
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrlhf.config import Layout
from jaxrlhf.resharding.hybrid import HybridEngine
from jaxrlhf.sharding.described import described
from jaxrlhf.sharding.mesh import factored_mesh, generation_mesh
from jaxrlhf.sharding.overlap import missing_bytes, refines

pytestmark = pytest.mark.usefixtures("no_leftovers")

# Every leaf can be split by all axes of any factorisation of eight devices.
SHAPES = {"layers": jax.ShapeDtypeStruct((8, 16), jnp.float32), "table": jax.ShapeDtypeStruct((64, 4), jnp.float32)}
DIMS = {"layers": ("layers", "mlp"), "table": ("vocab", "embed")}
MODEL_BYTES = (8 * 16 + 64 * 4) * 4

Sizes = tuple[int, int, int, int, int]


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def factorisations() -> list[Sizes]:
    """(p, t, d, p_g, t_g) of eight devices."""
    training = [(p, t, d) for p, t, d in product(divisors(8), repeat=3) if p * t * d == 8]
    return [(p, t, d, p_g, t_g) for p, t, d in training for p_g in divisors(p) for t_g in divisors(t)]


def engine_of(layout: Layout, *, dtype: jnp.dtype = jnp.float32) -> HybridEngine:
    devices = jax.devices()
    meshes = factored_mesh(layout, devices), generation_mesh(layout, devices)
    return HybridEngine.by_rules(*meshes, DIMS, SHAPES, dtype=dtype)


def weights_in(engine: HybridEngine) -> dict[str, jax.Array]:
    def build() -> dict[str, jax.Array]:
        return {name: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) + 1 for name, x in SHAPES.items()}

    return jax.jit(build, out_shardings=engine.train)()


def held(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[int, np.ndarray]:
    """Per device, which elements it holds."""
    masks = {}
    for device, index in sharding.devices_indices_map(shape).items():
        masks[device.id] = np.zeros(shape, bool)
        masks[device.id][index] = True
    return masks


def received(engine: HybridEngine) -> set[int]:
    """Bytes that each device misses, by enumeration of all elements."""
    totals = dict.fromkeys(range(8), 0)
    for name, array in SHAPES.items():
        old, new = held(engine.train[name], array.shape), held(engine.generate[name], array.shape)
        for device in totals:
            assert not (old[device] & ~new[device]).any(), f"device {device} would hold what it does not generate with"
            totals[device] += int((new[device] & ~old[device]).sum()) * 4
    return set(totals.values())


def micro_groups(p: int, t: int, d: int, p_g: int, t_g: int) -> set[frozenset[int]]:
    """Ranks that hold the same generation shard of one training replica, by counting ranks."""
    groups: dict[tuple[int, int, int], set[int]] = {}
    for rank in range(p * t * d):
        replica, stage, tensor = rank // (p * t), rank // t % p, rank % t
        groups.setdefault((replica, stage // (p // p_g), tensor // (t // t_g)), set()).add(rank)
    return {frozenset(group) for group in groups.values()}


def test_thirty_five_factorisations_are_covered() -> None:
    assert len(factorisations()) == len(set(factorisations())) == 35
    assert {(1, 4, 2, 1, 2), (1, 8, 1, 1, 1), (4, 2, 1, 2, 1), (8, 1, 1, 1, 1)} <= set(factorisations())
    assert set(factorisations()) >= COMPILED_FAST


def layout_of(p: int, t: int, d: int, p_g: int, t_g: int) -> Layout:
    return Layout(data=d, stage=p, tensor=t, generation_stage=p_g, generation_tensor=t_g)


def lacked(p: int, t: int, d: int, p_g: int, t_g: int) -> Fraction:
    """Bytes that a device gets from others, by the paper's formula."""
    return Fraction(t * p - t_g * p_g, t_g * p_g * t * p) * MODEL_BYTES


@pytest.mark.parametrize("sizes", factorisations(), ids=str)
def test_a_switch_costs_what_the_paper_says(sizes: Sizes) -> None:
    layout = layout_of(*sizes)
    engine = engine_of(layout)
    assert layout.refines
    assert engine.refines
    assert received(engine) == {lacked(*sizes)} == {engine.bytes_per_device}
    assert engine.bytes_back_per_device == 0


# Nothing to do, tensors, stages, both of them, each alone of both, Figure 8; the tier before a release has all.
COMPILED_FAST = {(1, 1, 8, 1, 1), (1, 8, 1, 1, 2), (8, 1, 1, 2, 1), (2, 4, 1, 1, 2), (2, 4, 1, 2, 1), (1, 4, 2, 1, 2)}


@pytest.mark.parametrize(
    ("p", "t", "d", "p_g", "t_g"),
    [pytest.param(*sizes, marks=[] if sizes in COMPILED_FAST else pytest.mark.seeds) for sizes in factorisations()],
)
def test_a_compiled_switch_moves_what_the_paper_says(p: int, t: int, d: int, p_g: int, t_g: int) -> None:
    engine, missing = engine_of(layout_of(p, t, d, p_g, t_g)), lacked(p, t, d, p_g, t_g)
    there, back = ([c for program in way for c in collectives(program)] for way in engine.lower())
    groups = micro_groups(p, t, d, p_g, t_g)
    assert {c.kind for c in there} == ({"all-gather"} if missing else set())
    # A leaf whose two split dimensions both grow is gathered along one and then along the other.
    assert all(any(group <= whole for whole in groups) for c in there for group in c.groups)
    assert joined([c.groups for c in there]) == (groups if missing else set())
    if p == p_g or t == t_g:
        assert all(set(c.groups) == groups for c in there)
    assert sum(c.received_bytes for c in there) == missing
    assert back == []

    empty = live_bytes()
    params = weights_in(engine)
    assert grown(empty) == {MODEL_BYTES // (t * p)} == {engine.train_bytes_per_device}
    weights, _ = engine.to_generation(params)
    assert grown(empty) == {MODEL_BYTES // (t_g * p_g)} == {engine.generation_bytes_per_device}  # and nothing twice
    params, _ = engine.to_training(weights, params)
    assert grown(empty) == {MODEL_BYTES // (t * p)}
    for name, array in SHAPES.items():
        np.testing.assert_array_equal(params[name], np.arange(array.size).reshape(array.shape) + 1)


def grown(before: dict[int, int]) -> set[int]:
    """Bytes that came to live on each device since `before`."""
    return {size - before[device] for device, size in live_bytes().items()}


@pytest.mark.parametrize("t_g", [1, 2])
def test_without_stages_micro_data_parallel_groups_are_consecutive(t_g: int) -> None:
    groups = micro_groups(1, 4, 2, 1, t_g)
    size = 4 // t_g
    assert groups == {frozenset(range(first, first + size)) for first in range(0, 8, size)}


def groups_along(mesh: Mesh, *axes: str) -> set[frozenset[int]]:
    """Devices that differ in these axes alone."""
    others = [axis for axis, name in enumerate(mesh.axis_names) if name not in axes]
    order = others + [mesh.axis_names.index(name) for name in axes]
    ids = np.array([device.id for device in mesh.devices.flat]).reshape(mesh.devices.shape).transpose(order)
    return {frozenset(group.tolist()) for group in ids.reshape(-1, math.prod(mesh.shape[name] for name in axes))}


def sets(text: str) -> set[frozenset[int]]:
    return {frozenset(map(int, group)) for group in text.strip("[]").split("][")}


def vanilla(dims: tuple[str | None, ...], *axes: str) -> NamedSharding:
    """Training 1-4-2 to generation 1-2-2-2 in the order that does not refine."""
    mesh = Mesh(
        np.asarray(jax.devices()).reshape(2, 2, 2), ("data", "micro", "tensor"), axis_types=(AxisType.Auto,) * 3
    )
    return NamedSharding(mesh, PartitionSpec(*(axes if name in ("mlp", "vocab") else None for name in dims)))


def vanilla_engine() -> HybridEngine:
    train, generate = (
        {name: vanilla(dims, *axes) for name, dims in DIMS.items()} for axes in (("micro", "tensor"), ("tensor",))
    )
    return HybridEngine(described(SHAPES, train), described(SHAPES, generate))


def test_figure_8() -> None:
    """HybridFlow (arXiv:2409.19256), Figure 8: eight devices, training 1-4-2, generation 1-2-2-2."""
    engine = engine_of(Layout(data=2, tensor=4, generation_tensor=2))
    mesh = engine.train["table"].mesh
    assert groups_along(mesh, "tensor", "micro_tensor") == sets("[0123][4567]")
    assert groups_along(mesh, "tensor") == sets("[02][13][46][57]")
    assert groups_along(mesh, "micro_tensor") == sets("[01][23][45][67]")
    assert groups_along(vanilla(("mlp",), "tensor").mesh, "tensor") == sets("[01][23][45][67]")

    parts = [(engine.train, "[0123][4567]"), (engine.generate, "[02][13][46][57]")]
    for layout, text in parts:  # each group holds every element once
        for name, array in SHAPES.items():
            masks = held(layout[name], array.shape)
            assert all((sum(masks[device].astype(int) for device in group) == 1).all() for group in sets(text))

    empty = live_bytes()
    params = weights_in(engine)
    _, switch = engine.to_generation(params)
    assert switch.bytes_per_device == MODEL_BYTES // 4
    assert grown(empty) == {MODEL_BYTES // 2}  # peak parameters, and with it no redundancy
    assert engine.redundancy_bytes_per_device == 0


def test_the_vanilla_axis_order_moves_more_and_leaves_devices_without_overlap() -> None:
    ours, theirs = engine_of(Layout(data=2, tensor=4, generation_tensor=2)), vanilla_engine()
    shape = SHAPES["table"].shape
    old, new = (held(layout["table"], shape) for layout in (theirs.train, theirs.generate))
    assert {device for device in range(8) if not (old[device] & new[device]).any()} == {1, 2, 5, 6}
    assert not theirs.refines
    assert not refines(theirs.train["table"], theirs.generate["table"], shape)
    assert theirs.bytes_per_device == MODEL_BYTES // 2 == 2 * ours.bytes_per_device

    mine, other = ([c for p in engine.lower().to_generation for c in collectives(p)] for engine in (ours, theirs))
    assert "collective-permute" in {c.kind for c in other}
    assert sum(c.received_bytes for c in other) > sum(c.received_bytes for c in mine)
    assert [c for p in theirs.lower().to_training for c in collectives(p)]


def test_a_cast_comes_before_the_gather() -> None:
    """Half the bytes travel, and what is received is counted in the dtype that travels."""
    full, half = (
        engine_of(Layout(data=2, tensor=4, generation_tensor=2), dtype=dtype) for dtype in (jnp.float32, jnp.float16)
    )
    table = SHAPES["table"].size * 4 // 4  # the other leaf has one dimension beside its layers, as scales have
    assert half.bytes_per_device == full.bytes_per_device - table // 2
    (program,) = half.lower().to_generation
    assert sum(c.received_bytes for c in collectives(program)) == half.bytes_per_device


def test_missing_bytes_is_the_most_over_devices() -> None:
    """One device is off: the mesh of two that has its halves swapped."""
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    source, target = NamedSharding(mesh, PartitionSpec(("a", "b"))), NamedSharding(mesh, PartitionSpec(("b", "a")))
    assert missing_bytes(source, target, jax.ShapeDtypeStruct((4,), jnp.float32)) == 4  # devices 1 and 2
    assert missing_bytes(source, source, jax.ShapeDtypeStruct((4,), jnp.float32)) == 0
