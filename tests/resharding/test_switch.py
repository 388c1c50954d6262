"""Switching real arrays: nothing is lost, nothing touches the host, nothing wrong is taken."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import host_reads, live_bytes
from switched import (
    NOT_REFINING,
    REFINING,
    STAGES,
    assert_equal,
    assert_laid_out,
    grown,
    model_engine,
    model_params,
    on_host,
    rows_engine,
    rows_params,
)

from jaxrlhf.config import Layout
from jaxrlhf.resharding.hybrid import HybridEngine, SwitchError
from jaxrlhf.sharding.described import described
from jaxrlhf.sharding.mesh import mesh_of
from jaxrlhf.sharding.rules import GENERATE, TRAIN, shardings

pytestmark = pytest.mark.usefixtures("no_leftovers")


@pytest.mark.parametrize("layout", [REFINING, STAGES, NOT_REFINING], ids=["refining", "stages", "not-refining"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_there_and_back_is_the_identity_and_touches_no_host(layout: Layout, dtype: Any) -> None:
    engine = model_engine(layout, dtype=dtype, bucket_bytes=16_384)
    assert engine.refines == layout.refines
    params = model_params(engine)
    before = on_host(params)
    for _ in range(2):
        with host_reads() as reads, jax.transfer_guard("disallow_explicit"):
            weights, switch = engine.to_generation(params)
        assert_laid_out(weights, engine.generate)
        assert_equal(weights, jax.tree.map(lambda x, cast: x.astype(cast.dtype), before, engine.generation_shapes))
        assert switch.bytes_per_device == engine.bytes_per_device > 0
        assert switch.seconds > 0
        with host_reads() as also, jax.transfer_guard("disallow_explicit"):
            params, back = engine.to_training(weights, params)
        assert reads == also == []
        assert_laid_out(params, engine.train)
        assert_equal(params, before)
        assert back.bytes_per_device == engine.bytes_back_per_device
    in_place = dtype == jnp.float32
    assert (engine.bytes_back_per_device > 0) == (in_place and not layout.refines)


EQUAL = {"w": jax.ShapeDtypeStruct((16, 64), jnp.float32)}


def test_a_device_put_between_splits_does_touch_the_host() -> None:
    """The check above of reads can fail: this is what a switch must not be."""
    engine = rows_engine(1, bucket_bytes=1)
    params = rows_params(engine)
    with host_reads() as reads:
        jax.device_put(params, engine.generate)
    assert (64, 16) in reads
    params = rows_params(engine)
    with (
        pytest.raises(Exception, match=r"Disallowed (host-to-device|device-to-host) transfer"),
        jax.transfer_guard("disallow_explicit"),
    ):
        jax.device_put(params, engine.generate)


def test_equal_layouts_share_their_buffers() -> None:
    mesh = mesh_of({"data": 8}, jax.devices())
    engine = HybridEngine.by_rules(mesh, mesh, {"w": (None, "mlp")}, EQUAL, dtype=jnp.float32)
    params = {"w": jax.device_put(jnp.ones((16, 64)), engine.train["w"])}
    weights, switch = engine.to_generation(params)
    assert weights["w"] is params["w"]
    assert switch.bytes_per_device == 0
    back, _ = engine.to_training(weights, params)
    assert back["w"] is params["w"]
    assert not params["w"].is_deleted()
    assert engine.lower() == ([], [])


def test_part_of_a_tree_with_mixed_dtypes() -> None:
    """Trees as with adapters: some parts, absent ones, integers beside floats of two widths."""
    mesh = mesh_of({"data": 2, "tensor": 2, "micro_tensor": 2}, jax.devices())
    dims = {
        "a": {"down": ("embed", None), "up": (None, "mlp")},
        "frozen": None,
        "codes": ("mlp",),
        "low": ("heads", None),
    }
    dtypes = {"a": {"down": jnp.float32, "up": jnp.float32}, "frozen": None, "codes": jnp.int8, "low": jnp.bfloat16}
    shapes = jax.tree.map(
        lambda names, dtype: jax.ShapeDtypeStruct((8,) * len(names), dtype), dims, dtypes,
        is_leaf=lambda x: isinstance(x, tuple),
    )  # fmt: skip
    trained = described(shapes, shardings(mesh, dims, TRAIN))
    generated = described(shapes, shardings(mesh, dims, GENERATE))
    generated["a"]["up"] = jax.ShapeDtypeStruct((8, 8), jnp.float16, sharding=generated["a"]["up"].sharding)
    engine = HybridEngine(trained, generated)

    def build() -> Any:
        return jax.tree.map(lambda x: jnp.arange(x.size).reshape(x.shape).astype(x.dtype), shapes)

    params = jax.jit(build, out_shardings=engine.train)()
    before = on_host(params)
    weights, switch = engine.to_generation(params)
    assert weights["frozen"] is None
    assert weights["a"]["down"] is params["a"]["down"]
    assert_equal(weights, {**before, "a": {**before["a"], "up": before["a"]["up"].astype(np.float16)}})
    # A quarter more of `up` in float16, of `codes` and of `low`.
    assert switch.bytes_per_device == (64 * 2 + 8 * 1 + 64 * 2) // 4
    params, _ = engine.to_training(weights, params)
    assert_equal(params, before)


def tied_engine() -> tuple[HybridEngine, dict[str, Any]]:
    mesh = mesh_of({"data": 2, "tensor": 2, "micro_tensor": 2}, jax.devices())
    dims = {"embed": ("vocab", "embed"), "head": ("vocab", "embed"), "other": ("mlp",)}
    train = shardings(mesh, dims, TRAIN)
    table = jax.jit(lambda: jnp.arange(64.0).reshape(16, 4), out_shardings=train["embed"])()
    params = {"embed": table, "head": table, "other": jax.device_put(jnp.arange(8.0), train["other"])}
    return HybridEngine(params, described(params, shardings(mesh, dims, GENERATE))), params


def test_tied_weights_are_one_weight() -> None:
    engine, params = tied_engine()
    before = on_host(params)
    once = (64 + 8) * 4
    assert engine.train_bytes_per_device == once // 4
    assert engine.generation_bytes_per_device == once // 2
    assert engine.bytes_per_device == once // 4
    there, _ = live_bytes(), params
    weights, switch = engine.to_generation(params)
    assert weights["embed"] is weights["head"]
    assert switch.bytes_per_device == once // 4
    assert set(grown(there).values()) == {once // 2 - once // 4}
    assert params["embed"].is_deleted()
    params, _ = engine.to_training(weights, params)
    assert params["embed"] is params["head"]
    assert set(grown(there).values()) == {0}
    assert_equal(params, before)


def test_equal_shapes_alone_tie_nothing() -> None:
    engine, _ = tied_engine()
    trained = described(engine.generation_shapes, engine.train)
    trained["head"] = trained["embed"]
    untied = HybridEngine(trained, engine.generation_shapes)
    assert untied.bytes_per_device == (64 + 64 + 8) * 4 // 4
    layout = engine.train["embed"]
    params = {name: jax.device_put(n + jnp.zeros((16, 4)), layout) for n, name in enumerate(("embed", "head"))}
    weights, _ = untied.to_generation({**params, "other": jax.device_put(jnp.zeros(8), engine.train["other"])})
    assert (float(weights["embed"][0, 0]), float(weights["head"][0, 0])) == (0.0, 1.0)


def test_tied_weights_that_part_ways_are_refused() -> None:
    engine, params = tied_engine()
    generated = {**engine.generation_shapes, "head": described(params, engine.train)["head"]}
    with pytest.raises(ValueError, match=r"\['head'\] and \['embed'\] are one array with two layouts"):
        HybridEngine(params, generated)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
@pytest.mark.parametrize("direction", ["to_generation", "to_training"])
def test_a_switch_that_fails_half_way_loses_nothing(
    direction: str, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rows_engine(3, bucket_bytes=1)
    given = params = rows_params(engine)
    before = on_host(params)
    if direction == "to_training":
        weights, _ = engine.to_generation(params)
    calls, original = [], jax.block_until_ready

    def out_of_memory(tree: Any) -> Any:
        calls.append(tree)
        if len(calls) == fails_at:
            raise MemoryError("RESOURCE_EXHAUSTED")
        return original(tree)

    monkeypatch.setattr(jax, "block_until_ready", out_of_memory)
    with pytest.raises(SwitchError, match=rf"stopped after {fails_at - 1} of 3 programs: RESOURCE_EXHAUSTED") as caught:
        if direction == "to_generation":
            engine.to_generation(params)
        else:
            engine.to_training(weights, params)
    monkeypatch.undo()
    assert isinstance(caught.value.__cause__, MemoryError)
    assert_equal(caught.value.weights, before)  # every leaf is alive, in one layout or the other
    params, _ = engine.to_training(caught.value.weights, given)
    assert_laid_out(params, engine.train)
    assert_equal(params, before)
    assert_equal(engine.to_generation(params)[0], before)


def test_a_failed_cast_keeps_its_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = model_engine(REFINING, dtype=jnp.bfloat16)
    params = model_params(engine)
    before = on_host(params)
    with monkeypatch.context() as patch, pytest.raises(SwitchError) as caught:
        patch.setattr(jax, "block_until_ready", lambda tree: (_ for _ in ()).throw(MemoryError("full")))
        engine.to_generation(params)
    restored, _ = engine.to_training(caught.value.weights, params)
    assert_equal(restored, before)


def test_what_cannot_be_switched_is_refused_before_anything_moves() -> None:
    engine = rows_engine(2, bucket_bytes=1)
    params = rows_params(engine)
    refusals: list[tuple[Any, str]] = [
        ({"w0": params["w0"]}, "got a tree of structure"),
        (on_host(params), r"\['w0'\] is a ndarray; expected a jax.Array"),
        ({**params, "w1": params["w1"].astype(jnp.bfloat16)}, r"\['w1'\] is bfloat16\(64, 16\); expected float32"),
        ({**params, "w1": jnp.zeros((2, 2))}, r"\['w1'\] is float32\(2, 2\); expected float32\(64, 16\)"),
        (
            {**params, "w1": jax.device_put(jnp.zeros((64, 16)), engine.generate["w1"])},
            r"\['w1'\] has layout P.*\('tensor'.* over data 2 x tensor 2 x micro_tensor 2 in .* memory, "
            r"expected P.*\(\('tensor', 'micro_tensor'\)",
        ),
        ({**params, "w1": jnp.zeros((64, 16))}, r"\['w1'\] has layout SingleDeviceSharding.*, expected P"),
    ]
    for given, message in refusals:
        with pytest.raises(ValueError, match=message):
            engine.to_generation(given)
    assert not any(leaf.is_deleted() for leaf in params.values())
    weights, _ = engine.to_generation(params)
    elsewhere = jax.device_put(jnp.zeros((64, 16)), jax.NamedSharding(engine.train["w0"].mesh, jax.P("data")))
    with pytest.raises(ValueError, match=r"\['w1'\] has layout P.*\('data'.*, expected .*\('tensor'"):
        engine.to_training({**weights, "w1": elsewhere}, params)
    assert not any(leaf.is_deleted() for leaf in weights.values())
    with pytest.raises(ValueError, match=r"\['w0'\] was deleted"):
        engine.to_generation(params)
    engine.to_training(weights, params)
    with pytest.raises(ValueError, match=r"\['w0'\] was deleted"):
        engine.to_training(weights, params)


def test_layouts_of_different_trees_are_refused() -> None:
    engine = rows_engine(2, bucket_bytes=1)
    trained = described(engine.generation_shapes, engine.train)
    with pytest.raises(ValueError, match="the two layouts have different structures"):
        HybridEngine(trained, {"w0": trained["w0"]})
    other = jax.ShapeDtypeStruct((2, 2), jnp.float32, sharding=engine.train["w0"])
    with pytest.raises(ValueError, match=r"\['w1'\] is \(64, 16\) in training and \(2, 2\) in generation"):
        HybridEngine(trained, {**trained, "w1": other})
    with pytest.raises(ValueError, match="bucket_bytes must be above 0, got 0"):
        rows_engine(1, bucket_bytes=0)


def test_the_engine_keeps_no_array_alive() -> None:
    engine, params = tied_engine()
    empty = live_bytes()
    params.clear()
    assert all(size < empty[device] for device, size in live_bytes().items())
    assert engine.train_bytes_per_device > 0
