"""Attention in blocks against a loop over queries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import to_read

from jaxrlhf.models.attention import attention_xla
from jaxrlhf.models.attention.chunks import attend_chunk


def by_query(query_RWNH, key_RWKH, value_RWKH, segment_RW):
    """Every query by itself, in float64."""
    rows, width, heads, head_dim = query_RWNH.shape
    group = heads // key_RWKH.shape[2]
    out = np.zeros(query_RWNH.shape)
    for row, at, head in np.ndindex(rows, width, heads):
        seen = [s for s in range(at + 1) if segment_RW[row, s] == segment_RW[row, at]]
        logit = key_RWKH[row, seen, head // group] @ query_RWNH[row, at, head] / np.sqrt(head_dim)
        weight = np.exp(logit - logit.max())
        out[row, at, head] = weight @ value_RWKH[row, seen, head // group] / weight.sum()
    return out


def random_rows(width):
    draw = np.random.default_rng(width)
    query, key, value = (draw.normal(size=(2, width, heads, 4)) for heads in (4, 2, 2))
    segment = np.sort(draw.integers(1, 4, size=(2, width)), axis=1)
    segment[1, -width // 3 :] = 0  # padding
    return query, key, value, segment


@pytest.mark.parametrize("width", [5, 64, 65, 150])
def test_blocks_compute_what_single_queries_do(width):
    rows = random_rows(width)
    arrays = [jnp.asarray(array, jnp.float32) for array in rows[:3]]
    blocks = jax.jit(attention_xla.attend_blocks)(*arrays, jnp.asarray(rows[3]))
    np.testing.assert_allclose(blocks, by_query(*rows), rtol=1e-5, atol=1e-5)


def as_one_chunk(query, key, value, segment):
    return attend_chunk(query, key, value, lambda start: (key, value), jnp.int32(0))


@pytest.mark.parametrize("attend", [attention_xla.attend_blocks, as_one_chunk])
@pytest.mark.parametrize("head_dim", [80, 96])
def test_scores_in_16_bits_are_off_by_chance_and_not_all_to_one_side(attend, head_dim):
    """Of two tokens the second's share of the first says how their scores differ; the root has no 16 bits."""
    query, key = np.random.default_rng(0).normal(size=(2, 3000, 2, 1, head_dim))
    query, key = jnp.asarray(query / 2, jnp.bfloat16), jnp.asarray(key, jnp.bfloat16)
    value = jnp.broadcast_to(jnp.eye(2)[:, None], (3000, 2, 1, 2))
    share_R = np.asarray(jax.jit(attend)(query, key, value, jnp.ones((3000, 2), jnp.int32)), np.float64)[:, 1, 0, 0]
    found_R = np.log(share_R / (1 - share_R))
    wide_RH, away_RSH = np.asarray(query, np.float64)[:, 1, 0], np.asarray(key, np.float64)[:, :, 0]
    true_R = np.einsum("RH,RH->R", wide_RH, away_RSH[:, 0] - away_RSH[:, 1]) / np.sqrt(head_dim)
    assert abs(found_R @ true_R / (true_R @ true_R) - 1) < 3e-4


def test_recomputing_a_block_does_not_change_the_gradient(monkeypatch):
    query, key, value, segment = (jnp.asarray(array) for array in random_rows(70))

    def gradient():
        def total(arrays):
            return jnp.sum(attention_xla.attend_blocks(*arrays, segment) ** 3)

        return jax.jit(jax.grad(total))([array.astype(jnp.float32) for array in (query, key, value)])

    kept = gradient()
    monkeypatch.setattr(attention_xla, "LONG_ROW", 65)
    for one, other in zip(gradient(), kept, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strip", [7, 10, 64])
def test_strips_of_a_block_compute_what_single_queries_do(monkeypatch, strip):
    """Blocks of 50 queries in strips that may not divide them, with gradients as of the whole block."""
    query, key, value, segment = random_rows(150)
    arrays = [jnp.asarray(array, jnp.float32) for array in (query, key, value)]

    def both():
        def total(arrays):
            out = attention_xla.attend_blocks(*arrays, jnp.asarray(segment))
            return jnp.sum(out**3), out

        return jax.jit(jax.grad(total, has_aux=True))(arrays)

    whole, _ = both()
    monkeypatch.setattr(attention_xla, "STRIP", strip)
    gradient, out = both()
    np.testing.assert_allclose(out, by_query(query, key, value, segment), rtol=1e-5, atol=1e-5)
    for one, other in zip(gradient, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_memory_of_a_long_row_grows_with_the_row():
    """Twice the tokens take twice the temporaries of forward and backward."""

    def temporary(width):
        shape = jax.ShapeDtypeStruct((1, width, 4, 8), jnp.float32)
        segment = jax.ShapeDtypeStruct((1, width), jnp.int32)

        def loss(query, key, value, segment):
            return attention_xla.attend_blocks(query, key, value, segment).sum()

        program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape, segment).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporary(16_384) < 2.1 * temporary(8192)


@pytest.mark.parametrize("width", [1, 63, 64, 100, 513, 4096, 5000])
def test_blocks_cover_a_row_once_and_are_few(width):
    blocks = attention_xla._blocks(width)
    assert [position for start, end in blocks for position in range(start, end)] == list(range(width))
    assert len(blocks) <= 8


def test_no_array_is_as_long_as_a_row_in_both_directions():
    width = 1024
    shape = jax.ShapeDtypeStruct((1, width, 2, 8), jnp.float32)
    segment = jax.ShapeDtypeStruct((1, width), jnp.int32)

    def loss(query, key, value, segment):
        return attention_xla.attend_blocks(query, key, value, segment).sum()

    program = to_read(jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape, segment))
    assert f",{width // 8}," in program.as_text() and f"{width},{width}]" not in program.as_text()
