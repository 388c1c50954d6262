"""Submeshes: which blocks of devices can generate alone, and that handing weights to them copies nothing."""

import re
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import host_reads, live_bytes
from jax.sharding import Mesh
from tiny_models import same_responses

from jaxrlhf.config import Layout, Sampling
from jaxrlhf.engine import Engine, Request
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.parameters import param_dims, param_shapes
from jaxrlhf.resharding.hybrid import HybridEngine
from jaxrlhf.sharding.mesh import AXES, SLOT_AXES, factored_mesh, generation_mesh, mesh_of
from jaxrlhf.sharding.submesh import hand_over, local_submesh, submesh_of

pytestmark = pytest.mark.usefixtures("no_leftovers")

MODEL = ModelConfig("qwen3", 32, 16, 32, 2, 4, 4, 8)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def layouts() -> list[Layout]:
    sizes = [(p, t) for p, t in product((1, 2, 4, 8), repeat=2) if p * t <= 8]
    return [
        Layout(stage=p, tensor=t, generation_stage=p_g, generation_tensor=t_g)
        for p, t in sizes
        for p_g in divisors(p)
        for t_g in divisors(t)
    ]


def replicas(mesh: Mesh) -> set[frozenset[int]]:
    """Devices that differ in stage and tensor alone, by their coordinates."""
    found: dict[tuple[int, ...], set[int]] = {}
    for position in np.ndindex(mesh.devices.shape):
        rest = tuple(at for at, axis in zip(position, AXES, strict=True) if axis not in ("stage", "tensor"))
        found.setdefault(rest, set()).add(mesh.devices[position].id)
    return {frozenset(group) for group in found.values()}


def ids(mesh: Mesh) -> list[int]:
    return [device.id for device in mesh.devices.flat]


def submeshes(mesh: Mesh, *, size: int) -> list[Mesh]:
    """The mesh cut into submeshes of so many devices."""
    order = list(mesh.devices.flat)
    return [submesh_of(mesh, order[start : start + size]) for start in range(0, mesh.size, size)]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_an_submesh_is_a_block_that_is_closed_under_generation_replicas(size: int) -> None:
    refused = 0
    for layout in layouts():
        mesh = generation_mesh(layout, jax.devices())
        blocks = [set(range(start, start + size)) for start in range(0, 8, size)]
        closed = all(group <= block or not group & block for group in replicas(mesh) for block in blocks)
        if not closed:
            refused += 1
            with pytest.raises(ValueError, match=rf"would span hosts.* must divide the {size} devices of a host"):
                submeshes(mesh, size=size)
            continue
        parts = submeshes(mesh, size=size)
        assert [set(ids(part)) for part in parts] == blocks
        assert all(part.axis_names == AXES for part in parts)
        assert {group for part in parts for group in replicas(part)} == replicas(mesh)
    assert refused == 0 if size == 8 else refused > 0


def test_one_process_is_the_whole_mesh() -> None:
    mesh = generation_mesh(Layout(tensor=4, generation_tensor=2), jax.devices())
    assert local_submesh(mesh) is mesh
    assert submesh_of(mesh, jax.devices()) == mesh


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices 0 to 3 belong to one process, 4 to 7 to another."""
    monkeypatch.setattr(type(jax.devices()[0]), "process_index", property(lambda device: device.id // 4))


@pytest.mark.usefixtures("two_hosts")
def test_the_submesh_of_a_process_is_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = generation_mesh(Layout(tensor=4, generation_tensor=2), jax.devices())
    for process, devices in enumerate(([0, 1, 2, 3], [4, 5, 6, 7])):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert ids(local_submesh(mesh)) == devices
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    with pytest.raises(ValueError, match="process 2 has no device in a mesh of 8"):
        local_submesh(mesh)


@pytest.mark.usefixtures("two_hosts")
def test_a_replica_that_would_span_hosts_is_refused_and_told_what_would_do() -> None:
    mesh = generation_mesh(Layout(tensor=8, generation_tensor=2), jax.devices())
    message = (
        "replicas of generation_stage 1 x generation_tensor 2 = 2 devices would span hosts: a replica uses a block of "
        "8 devices of the mesh, which must divide the 4 devices of a host"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        local_submesh(mesh)


def test_devices_that_are_no_block_are_refused() -> None:
    mesh = generation_mesh(Layout(tensor=2), jax.devices())
    devices = jax.devices()
    for given in ([devices[0], devices[2]], [devices[1], devices[0]], devices[:0], [*devices, devices[0]]):
        with pytest.raises(ValueError, match="are not a block of consecutive devices of the mesh"):
            submesh_of(mesh, given)
    tensor = mesh_of({"data": 4, "tensor": 2}, devices)
    with pytest.raises(ValueError, match="must divide the 2 devices of a host"):
        submesh_of(tensor, devices[1:3])


def weights_of(layout: Layout) -> Any:
    """A model's weights as `to_generation` leaves them."""
    meshes = factored_mesh(layout, jax.devices()), generation_mesh(layout, jax.devices())
    dims, shapes = param_dims(MODEL, "lm"), param_shapes(MODEL, "lm")
    hybrid = HybridEngine.by_rules(*meshes, dims, shapes, dtype=jnp.float32)
    rng = np.random.default_rng(3)
    params = jax.tree.map(lambda x: 0.2 * rng.standard_normal(x.shape, np.float32), shapes)
    return hybrid.to_generation(jax.device_put(params, hybrid.train))[0]


def pointers(array: jax.Array) -> dict[int, int]:
    return {shard.device.id: shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


@pytest.mark.parametrize(
    ("layout", "size"),
    [(Layout(tensor=4, generation_tensor=2), 4), (Layout(stage=2, tensor=2), 2), (Layout(fsdp=4, tensor=2), 1)],
)
def test_handing_over_shares_the_buffers(layout: Layout, size: int) -> None:
    weights = weights_of(layout)
    parts = submeshes(generation_mesh(layout, jax.devices()), size=size)
    whole = jax.tree.map(np.asarray, weights)
    before = live_bytes()
    with host_reads() as reads, jax.transfer_guard("disallow_explicit"):
        views = [hand_over(weights, part) for part in parts]
    assert reads == []
    assert live_bytes() == before
    for part, view in zip(parts, views, strict=True):
        for mine, theirs, values in zip(*map(jax.tree.leaves, (view, weights, whole)), strict=True):
            assert mine.sharding.mesh == part
            assert pointers(mine).items() <= pointers(theirs).items()
            assert sorted(pointers(mine)) == sorted(ids(part))
            np.testing.assert_array_equal(mine, values)


def test_freeing_the_weights_frees_the_views() -> None:
    layout = Layout(tensor=4, generation_tensor=2)
    before = live_bytes()
    weights = weights_of(layout)
    views = [hand_over(weights, part) for part in submeshes(generation_mesh(layout, jax.devices()), size=4)]
    for leaf in jax.tree.leaves(weights):
        leaf.delete()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(views))
    assert live_bytes() == before


def test_weights_that_are_not_whole_on_an_submesh_are_refused() -> None:
    mesh = mesh_of({"fsdp": 2, "micro_tensor": 4}, jax.devices())
    part = submeshes(mesh, size=4)[1]
    split = jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(mesh, jax.P("fsdp")))
    with pytest.raises(ValueError, match=r"\['w'\] in layout .*'fsdp'.* is not complete on a submesh of 4 devices"):
        hand_over({"w": split}, part)
    elsewhere = jax.device_put(jnp.ones(8), jax.devices()[0])
    with pytest.raises(ValueError, match=r"\['w'\] has sharding .*expected a NamedSharding"):
        hand_over({"w": elsewhere}, part)


def generate(mesh: Mesh, weights: Any, requests: list[Request]) -> list[Any]:
    engine = Engine(
        MODEL,
        mesh,
        slots=8,
        max_prompt_tokens=8,
        max_response_tokens=8,
        stop_tokens=(3,),
        decode_tokens_per_dispatch=4,
        slot_axes=SLOT_AXES,
        kv_head_axis="tensor",
    )
    engine.load(weights, version=0)
    return engine.generate(requests, Sampling(temperature=0.8), seed=11)


@pytest.mark.slow
def test_a_submesh_generates_what_the_spanning_engine_does() -> None:
    layout = Layout(tensor=4, generation_tensor=2)
    mesh, weights = generation_mesh(layout, jax.devices()), weights_of(layout)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 32, 8).tolist()) for _ in range(6)]
    requests = [Request(2 * group + copy, prompt) for group, prompt in enumerate(prompts) for copy in range(2)]
    together = generate(mesh, weights, requests)
    part = submeshes(mesh, size=4)[1]
    apart = generate(part, hand_over(weights, part), requests[6:])
    assert len({completion.tokens for completion in together}) > 1
    same_responses(apart, together[6:])
