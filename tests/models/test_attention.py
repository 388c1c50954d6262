"""Attention kernels against a naive reference, alone and on a mesh; those of accelerators are interpreted."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from tiny_models import close

from jaxrlhf.models.attention.attention import DECODE, ROWS, attend, attend_cache
from jaxrlhf.models.attention.score_mod import PLAIN, ScoreMod
from jaxrlhf.models.execution import Execution
from jaxrlhf.models.kernels import tpu
from jaxrlhf.models.kernels.gpu import pallas_decode
from jaxrlhf.models.kernels.gpu_rows import flash_rows
from jaxrlhf.models.kernels.tpu import splash_rows
from jaxrlhf.planner.hardware import hardware
from jaxrlhf.planner.topology import topology


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Kernels of accelerators run on the CPU."""
    monkeypatch.setitem(ROWS, "splash", partial(splash_rows, interpret=True))
    monkeypatch.setitem(ROWS, "flash", partial(flash_rows, interpret=True))
    monkeypatch.setitem(DECODE, "pallas", partial(pallas_decode, interpret=True))


def softmax(score, sink=-np.inf):
    """Weights of scores; a sink takes its share."""
    weight = np.exp(score - score.max())
    return weight / (weight.sum() + np.exp(sink - score.max()))


SINKS = np.array([0.4, -1.0, 2.0, 0.1])


def naive_rows(query, key, value, segment, weight, *, divisor=None, cap=np.inf, window=np.inf, sinks=None):
    """The output, and the gradients of its product with `weight`: token by token, in float64.

    The last is that of sinks, if there are any.
    """
    rows, width, heads, head_dim = query.shape
    group = heads // key.shape[2]
    divisor = divisor or np.sqrt(head_dim)
    out = np.zeros_like(query)
    grads = [np.zeros_like(array) for array in (query, key, value, *([] if sinks is None else [sinks]))]
    for r, t, n in np.ndindex(rows, width, heads):
        k = n // group
        seen = [s for s in range(t + 1) if segment[r, s] == segment[r, t] and s > t - window]
        score, slope = capped(key[r, seen, k] @ query[r, t, n] / divisor, cap)
        chance = softmax(score) if sinks is None else softmax(score, sinks[n])
        out[r, t, n] = chance @ value[r, seen, k]
        pull = value[r, seen, k] @ weight[r, t, n]
        change = slope * chance * (pull - chance @ pull) / divisor
        grads[0][r, t, n] += change @ key[r, seen, k]
        grads[1][r, seen, k] += change[:, None] * query[r, t, n]
        grads[2][r, seen, k] += chance[:, None] * weight[r, t, n]
        if sinks is not None:
            grads[3][n] -= (1 - chance.sum()) * (chance @ pull)
    return out, *grads


def capped(score, cap):
    """Scores under a soft cap, and the slope of the cap."""
    if cap == np.inf:
        return score, np.ones_like(score)
    return cap * np.tanh(score / cap), 1 / np.cosh(score / cap) ** 2


def naive_cache(query, key, value, position, *, divisor=None, cap=np.inf, window=np.inf, sinks=None):
    slots, heads, head_dim = query.shape
    group, capacity = heads // key.shape[1], key.shape[3]
    out = np.zeros_like(query)
    for b, n in np.ndindex(slots, heads):
        newest = min(position[b], capacity - 1)
        k, seen = n // group, slice(int(max(0, newest + 1 - window)), newest + 1)
        score, _ = capped(query[b, n] @ key[b, k, :, seen] / (divisor or np.sqrt(head_dim)), cap)
        out[b, n] = softmax(score, -np.inf if sinks is None else sinks[n]) @ value[b, k, seen]
    return out


def random_arrays(*shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape) for shape in shapes]


def run_rows(execution, query, key, value, segment, weight, scores=PLAIN):
    out, pull = jax.vjp(lambda *arrays: attend(*arrays, segment, scores, execution=execution), query, key, value)
    return out, *pull(weight)


# Segments that end inside a tile, at its edge and one token long; padding at the end, and none.
SEGMENTS = {
    150: [[1] * 50 + [2] + [3] * 77 + [4] * 12 + [0] * 10, [5] * 150],
    18: [[1] * 7 + [2] * 11, [1] * 3 + [0] * 15],
}


@pytest.mark.parametrize("kernel", ["splash", "flash"])
def test_packed_rows_and_their_gradients_are_those_of_the_naive_reference(kernel):
    query, key, value, weight = random_arrays(*[(2, 150, count, 16) for count in (6, 2, 2, 6)])
    segment = np.array(SEGMENTS[150], np.int32)
    *arrays, wide = (np.asarray(array, np.float32) for array in (query, key, value, weight))
    ours = jax.jit(partial(run_rows, Execution(rows_kernel=kernel)))(*arrays, segment, wide)
    for got, true in zip(ours, naive_rows(query, key, value, segment, weight), strict=True):
        close(got, true)


OTHER = {"divisor": 1.3, "cap": 0.8, "window": 6}
"""Scores that have everything."""


def other_scores(slides=None):
    return ScoreMod(OTHER["divisor"], OTHER["cap"], OTHER["window"], slides)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["splash", "flash"])
def test_rows_under_a_soft_cap_and_a_window_that_a_layer_may_not_have(kernel):
    query, key, value, weight = random_arrays(*[(2, 18, count, 16) for count in (2, 1, 1, 2)])
    segment = np.array(SEGMENTS[18], np.int32)
    arrays = [np.asarray(array, np.float32) for array in (query, key, value)]
    run = jax.jit(partial(run_rows, Execution(rows_kernel=kernel)))
    for slides in (True, False):
        ours = run(*arrays, segment, np.asarray(weight, np.float32), other_scores(jnp.array(slides)))
        there = OTHER if slides else OTHER | {"window": np.inf}
        for got, true in zip(ours, naive_rows(query, key, value, segment, weight, **there), strict=True):
            close(got, true)


def run_rows_with_sinks(execution, query, key, value, segment, weight, sinks):
    def rows(query, key, value, sinks):
        return attend(query, key, value, segment, replace(other_scores(), sink_N=sinks), execution=execution)

    out, pull = jax.vjp(rows, query, key, value, sinks)
    return out, *pull(weight)


def test_sinks_take_their_share_of_rows():
    query, key, value, weight = (
        np.float32(array) for array in random_arrays(*[(2, 18, count, 16) for count in (4, 2, 2, 4)])
    )
    segment = np.array(SEGMENTS[18], np.int32)
    run = jax.jit(partial(run_rows_with_sinks, Execution(rows_kernel="flash")))
    ours = run(query, key, value, segment, weight, np.float32(SINKS))
    expected = naive_rows(*(np.float64(x) for x in (query, key, value)), segment, weight, **OTHER, sinks=SINKS)
    for got, true in zip(ours, expected, strict=True):
        close(got, true)


@pytest.mark.slow
def test_a_row_of_more_tiles_than_a_splash_kernel_can_have_takes_several(monkeypatch):
    monkeypatch.setattr(tpu, "_BLOCK", 128)
    monkeypatch.setattr(tpu, "_LONG_BLOCK", 128)
    monkeypatch.setattr(tpu, "_TILES", 6)  # two of the three parts of the queries, and the third
    query, key, value, weight = random_arrays(*[(1, 300, count, 16) for count in (2, 1, 1, 2)])
    segment = np.array([[1] * 120 + [2] * 170 + [0] * 10], np.int32)
    arrays = [np.asarray(array, np.float32) for array in (query, key, value)]
    scores = ScoreMod(OTHER["divisor"], OTHER["cap"], 140)
    ours = jax.jit(partial(run_rows, Execution(rows_kernel="splash")))(
        *arrays, segment, np.asarray(weight, np.float32), scores
    )
    for got, true in zip(ours, naive_rows(query, key, value, segment, weight, **OTHER | {"window": 140}), strict=True):
        close(got, true)


@pytest.mark.parametrize("window", [None, 1, 3, 5, 9])
def test_corners_of_a_tile_say_whether_any_and_all_of_it_is_seen(window):
    before, start, end = None if window is None else window - 1, 4, 16
    mask = tpu._Near((end - start, end), (before, 0), start)
    query, key = np.arange(start, end)[:, None], np.arange(end)
    whole = (key <= query) & (key > query - (window or end))
    for rows, columns in itertools.product((1, 2, 4), repeat=2):
        for row, column in itertools.product(range(0, end - start, rows), range(0, end, columns)):
            tile = slice(row, row + rows), slice(column, column + columns)
            assert (mask[tile].any(), mask[tile].all()) == (whole[tile].any(), whole[tile].all())


def test_blocks_leave_out_keys_before_the_window_of_all_layers():
    query, key, value = (np.asarray(x, np.float32) for x in random_arrays(*[(1, 150, count, 8) for count in (2, 1, 1)]))
    segment = np.array([[1] * 100 + [2] * 50], np.int32)
    run = jax.jit(lambda *arrays: attend(*arrays, segment, other_scores()))
    out = naive_rows(*(np.float64(array) for array in (query, key, value)), segment, np.zeros((1, 150, 2, 8)), **OTHER)[
        0
    ]
    close(run(query, key, value), out)
    key[:, :69] = np.nan  # the second block, of 50 queries, begins its keys at 50 - 5; the third at 95
    assert np.isfinite(run(query, key, value)[:, 100:]).all()


@pytest.mark.parametrize("kernel", ["xla", "pallas"])
def test_a_token_sees_its_cache_under_a_soft_cap_inside_its_window_and_beside_sinks(kernel):
    capacity = 600
    query, key, value = random_arrays((6, 4, 16), (6, 2, 16, capacity), (6, 2, capacity, 16))
    # In the first window, across a tile's edge, across a part's, all of it, and one that has run past it.
    position = np.array([0, 3, 66, 514, capacity - 1, capacity + 9], np.int32)
    arrays = [np.asarray(array, np.float32) for array in (query, key, value)]
    run = jax.jit(partial(attend_cache, execution=Execution(decode_kernel=kernel)))
    for slides in (True, False):
        there = OTHER if slides else OTHER | {"window": np.inf}
        scores = replace(other_scores(jnp.array(slides)), sink_N=np.float32(SINKS))
        close(run(*arrays, position, scores), naive_cache(query, key, value, position, **there, sinks=SINKS))


@pytest.mark.parametrize("kernel", ["xla", "pallas"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "capacity"), [(7, 1, 16, 700), (20, 1, 24, 65)])
def test_a_token_attends_to_what_is_filled_of_its_cache(kernel, heads, kv_heads, head_dim, capacity):
    shapes = [(5, heads, head_dim), (5, kv_heads, head_dim, capacity), (5, kv_heads, capacity, head_dim)]
    query, key, value = random_arrays(*shapes)
    # One entry, a tile, a tile and one more, all of it; and a slot that is done and has run past it.
    position = np.array([0, 15, min(64, capacity - 2), capacity - 1, capacity + 9], np.int32)
    arrays = [np.asarray(array, np.float32) for array in (query, key, value)]
    ours = jax.jit(partial(attend_cache, execution=Execution(decode_kernel=kernel)))(*arrays, position)
    close(ours, naive_cache(query, key, value, position))


def test_the_decode_kernel_reads_nothing_past_what_is_filled():
    query, key, value = (
        np.asarray(array, np.float32) for array in random_arrays((2, 4, 16), (2, 2, 16, 600), (2, 2, 600, 16))
    )
    position = np.array([9, 511], np.int32)
    run = jax.jit(partial(attend_cache, execution=Execution(decode_kernel="pallas")))
    clean = run(query, key, value, position)
    for slot, last in enumerate(position):
        key[slot, :, :, last + 1 :] = value[slot, :, last + 1 :] = np.nan
    np.testing.assert_array_equal(run(query, key, value, position), clean)


def test_splash_attention_is_accepted_by_the_compiler_for_tpu():
    def loss(query, key, value):
        return splash_rows(query, key, value, jnp.ones((2, 200), jnp.int32), other_scores()).astype(jnp.float32).sum()

    arrays = [jax.ShapeDtypeStruct((2, 200, count, 64), jnp.bfloat16) for count in (14, 2, 2)]
    lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*arrays).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") >= 3  # forward, gradient of queries, of keys and values


@pytest.mark.slow
def test_the_kernel_of_rows_has_no_square_mask_on_gpu():
    width, place = 32_768, SingleDeviceSharding(topology(hardware("h100"))[0])

    def loss(*arrays):
        return flash_rows(*arrays, other_scores()).astype(jnp.float32).sum()

    shapes = [(1, width, count, 128) for count in (14, 2, 2)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in shapes]
    segment = jax.ShapeDtypeStruct((1, width), jnp.int32, sharding=place)
    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays, segment).compile()
    # The output, and by head the norm of its softmax and the product with its gradient; no [W, W] anywhere.
    output, others = width * 14 * 128 * 2, width * (2 * 14 + 4) * 4
    assert output <= program.memory_analysis().temp_size_in_bytes < output + others + 2**20


@pytest.mark.parametrize("kernel", ["xla", "pallas"])
def test_a_token_sees_its_window_in_a_ring(kernel, monkeypatch):
    monkeypatch.setattr("jaxrlhf.models.kernels.gpu._SMALLEST_PART", 64)
    scores, there = ScoreMod(1.3, 0.8, 60), {"divisor": 1.3, "cap": 0.8, "window": 60}
    position, entries = np.array([3, 59, 99, 100, 150, 399], np.int32), 100
    query, key, value = (np.float32(x) for x in random_arrays((6, 4, 16), (6, 2, 16, 400), (6, 2, 400, 16)))
    expected = naive_cache(query, key, value, position, **there)
    kept = [[newest - (newest - entry) % entries for entry in range(entries)] for newest in position]
    key, value = (
        np.stack([whole.take(places, axis) for whole, places in zip(array, kept, strict=True)])
        for array, axis in ((key, 2), (value, 1))
    )
    run = jax.jit(partial(attend_cache, ring=True, execution=Execution(decode_kernel=kernel)))
    close(run(query, key, value, position, scores), expected)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="needs to know the GPU, and warns")
@pytest.mark.parametrize(
    ("head_dim", "dtype", "scores"),
    [(96, "bfloat16", PLAIN), (128, "float32", PLAIN), (256, "bfloat16", other_scores())],
)
def test_the_decode_kernel_is_accepted_by_the_compiler_for_gpu(head_dim, dtype, scores):
    shapes = [(4, 14, head_dim), (4, 2, head_dim, 700), (4, 2, 700, head_dim)]
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    kernel = partial(pallas_decode, ring=scores.window is not None)
    program = jax.jit(kernel).trace(*arrays, jax.ShapeDtypeStruct((4,), jnp.int32), scores)
    assert "xla.gpu.triton" in program.lower(lowering_platforms=("cuda",)).as_text()


def on_mesh(spec_of):
    """Two replicas, two ways to split heads, and an axis that splits nothing."""
    mesh = Mesh(
        np.array(jax.devices()[:4]).reshape(2, 1, 2), ("data", "idle", "tensor"), axis_types=(AxisType.Auto,) * 3
    )
    execution = Execution(
        rows_kernel="flash", decode_kernel="pallas", mesh=mesh, row_axes=("data",), head_axes=("tensor",)
    )
    return execution, [NamedSharding(mesh, PartitionSpec(*spec)) for spec in spec_of]


def test_rows_heads_and_their_sinks_stay_where_they_are_on_a_mesh():
    head, row = ("data", None, "tensor"), ("data",)
    execution, layout = on_mesh([head, head, head, row, head, ("tensor",)])
    run = partial(run_rows_with_sinks, execution)
    query, key, value, weight = (np.float32(x) for x in random_arrays(*[(4, 20, n, 8) for n in (4, 2, 2, 4)]))
    arrays = query, key, value, np.ones((4, 20), np.int32), weight, np.float32(SINKS)
    program = jax.jit(run, in_shardings=layout).lower(*arrays).compile()
    expected = naive_rows(*arrays[:5], **OTHER, sinks=SINKS)
    for ours, theirs in zip(program(*jax.device_put(arrays, tuple(layout))), expected, strict=True):
        close(ours, theirs)
    assert not any(word in program.as_text() for word in ("all-gather", "all-to-all", "collective-permute"))


def test_slots_and_heads_stay_where_they_are_on_a_mesh():
    head, slot = ("data", "tensor"), ("data",)
    execution, layout = on_mesh([head, head, head, slot, ("tensor",)])
    query, key, value = (np.asarray(x, np.float32) for x in random_arrays((4, 4, 8), (4, 2, 8, 30), (4, 2, 30, 8)))
    arrays = query, key, value, np.array([0, 3, 17, 29], np.int32), np.float32(SINKS)

    def run(*arrays):
        *arrays, sinks = arrays
        return attend_cache(*arrays, ScoreMod(sink_N=sinks), execution=execution)

    program = jax.jit(run, in_shardings=layout).lower(*arrays).compile()
    close(program(*jax.device_put(arrays, tuple(layout))), naive_cache(*arrays[:4], sinks=SINKS))
    assert "all-" not in program.as_text() and "collective" not in program.as_text()
