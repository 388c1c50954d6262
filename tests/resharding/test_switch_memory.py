"""Memory of devices while weights are switched: nothing twice in one dtype, and at most one bucket beside it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from compiled import collectives, live_bytes, to_read
from switched import NOT_REFINING, REFINING, STAGES, grown, model_engine, model_params, rows_engine, rows_params

from jaxrlhf.config import Layout

pytestmark = pytest.mark.usefixtures("no_leftovers")


@contextmanager
def sampled(before: dict[int, int]) -> Iterator[list[int]]:
    """Most bytes on any device right before each deletion, when old and new exist."""
    array_type: Any = type(jnp.zeros(()))
    original, samples = array_type.delete, []

    def delete(array: jax.Array) -> None:
        samples.append(max(grown(before).values()))
        original(array)

    array_type.delete = delete
    try:
        yield samples
    finally:
        array_type.delete = original


@pytest.mark.parametrize("layout", [REFINING, STAGES, NOT_REFINING], ids=["refining", "stages", "not-refining"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_weight_is_held_twice_but_masters_beside_casts(layout: Layout, dtype: Any) -> None:
    engine = model_engine(layout, dtype=dtype)
    empty = live_bytes()
    params = model_params(engine)
    assert set(grown(empty).values()) == {engine.train_bytes_per_device}
    weights, _ = engine.to_generation(params)
    beside = {size - engine.generation_bytes_per_device for size in grown(empty).values()}
    assert beside == {engine.redundancy_bytes_per_device}
    assert (engine.redundancy_bytes_per_device > 0) == (engine.copy_bytes_per_device > 0) == (dtype == jnp.bfloat16)
    waiting = jax.tree.map(lambda old, new: not old.is_deleted() and new is not old, params, weights)
    assert engine.masters == waiting
    assert any(jax.tree.leaves(waiting)) == (dtype == jnp.bfloat16) and not all(jax.tree.leaves(waiting))
    params, _ = engine.to_training(weights, params)
    assert set(grown(empty).values()) == {engine.train_bytes_per_device}


def test_a_cast_leaves_its_master_and_frees_the_copy() -> None:
    engine = model_engine(STAGES, dtype=jnp.bfloat16)
    empty = live_bytes()
    params = model_params(engine)
    masters = jax.tree.leaves(params)
    weights, _ = engine.to_generation(params)
    pairs = list(zip(masters, jax.tree.leaves(weights), strict=True))
    assert {new.dtype for _, new in pairs} == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}
    # Norm scales, split over stages, keep their dtype and move; only of the others is there a master.
    assert all(old.is_deleted() == (new.dtype == jnp.float32 and new is not old) for old, new in pairs)
    kept = [old for old, new in pairs if not old.is_deleted() and new is not old]
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in (*kept, *jax.tree.leaves(weights)))
    assert set(grown(empty).values()) == {held}
    copies = [new for _, new in pairs if new.dtype == jnp.bfloat16]
    assert sum(leaf.addressable_shards[0].data.nbytes for leaf in copies) == engine.copy_bytes_per_device
    params, _ = engine.to_training(weights, params)
    assert set(grown(empty).values()) == {engine.train_bytes_per_device}
    assert all(new is old for new, old in zip(jax.tree.leaves(params), masters, strict=True) if not old.is_deleted())


@pytest.mark.parametrize("leaves_per_bucket", [1, 2, 6])
def test_beside_the_target_there_are_the_sources_of_one_bucket(leaves_per_bucket: int) -> None:
    leaf = 64 * 16 * 4
    engine = rows_engine(6, bucket_bytes=leaves_per_bucket * (leaf // 4 + 2 * leaf // 2))
    empty = live_bytes()
    params = rows_params(engine)
    with sampled(empty) as samples:
        weights, _ = engine.to_generation(params)
    # While the last bucket is gathered, everything else is in the generation layout already.
    assert max(samples) == 6 * leaf // 2 + leaves_per_bucket * leaf // 4
    with sampled(empty) as samples:
        params, _ = engine.to_training(weights, params)
    assert max(samples) == 6 * leaf // 2 + leaves_per_bucket * leaf // 4
    there, back = engine.lower()
    assert len(there) == len(back) == 6 // leaves_per_bucket


def temporaries(programs: list[jax.stages.Lowered]) -> list[int]:
    """Bytes that each program takes per device beside what it is given and what it returns."""
    return [to_read(program).memory_analysis().temp_size_in_bytes for program in programs]


LAYOUTS = {"refining": REFINING, "stages": STAGES, "not-refining": NOT_REFINING}
KINDS = [(name, dtype, leaves) for name in LAYOUTS for dtype in ("float32", "float16") for leaves in (1, 3)]
FAST = {("refining", "float32", 1), ("stages", "float16", 3), ("not-refining", "float32", 3)}


# XLA for CPU gathers bfloat16 as float32.
@pytest.mark.parametrize(
    ("name", "dtype", "leaves"),
    [pytest.param(*kind, marks=[] if kind in FAST else pytest.mark.seeds) for kind in KINDS],
)
def test_with_temporaries_a_switch_takes_the_larger_layout_and_a_bucket(
    name: str, dtype: str, leaves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters of a model, gathered along their second and third dimension."""
    layout = LAYOUTS[name]
    alike = model_engine(layout, dtype=dtype)
    trees = map(jax.tree.leaves, (alike.generation_shapes, alike.train, alike.generate))
    largest = max(
        4 * math.prod(old.shard_shape(x.shape)) + 2 * x.dtype.itemsize * math.prod(new.shard_shape(x.shape))
        for x, old, new in zip(*trees, strict=True)
    )
    engine = model_engine(layout, dtype=dtype, bucket_bytes=leaves * largest)
    generating = engine.generation_bytes_per_device + engine.redundancy_bytes_per_device
    larger = max(generating, engine.train_bytes_per_device)
    there, back = engine.lower()
    beside = [*temporaries(there), *temporaries(back)]
    assert len(there) > 1

    empty, params, held, original = live_bytes(), model_params(engine), [], jax.block_until_ready

    def watched(tree: Any) -> Any:
        held.append(max(grown(empty).values()))
        return original(tree)

    monkeypatch.setattr(jax, "block_until_ready", watched)  # after each program, before its sources are freed
    weights, _ = engine.to_generation(params)
    engine.to_training(weights, params)
    peaks = [now + more for now, more in zip(held, beside, strict=True)]
    assert larger < max(peaks) <= larger + leaves * largest


def test_a_leaf_larger_than_a_bucket_is_a_bucket() -> None:
    assert len(rows_engine(3, bucket_bytes=1).lower().to_generation) == 3


def test_casts_come_in_buckets_too() -> None:
    engine = model_engine(REFINING, dtype=jnp.bfloat16, bucket_bytes=1)
    programs = engine.lower().to_generation
    assert len(programs) == sum(jax.tree.leaves(engine.masters)) > 1
    assert {c.kind for program in programs for c in collectives(program)} == {"all-gather"}
    (whole,) = model_engine(REFINING, dtype=jnp.bfloat16).lower().to_generation
    assert {c.kind for c in collectives(whole)} == {"all-gather"}
