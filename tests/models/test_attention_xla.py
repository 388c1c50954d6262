"""Attention in blocks and tiles against all pairs at once."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import to_read

from jaxrlhf.models.attention import attention_xla
from jaxrlhf.models.attention.chunks import attend_chunk
from jaxrlhf.models.attention.score_mod import ScoreMod


def random_rows(width):
    draw = np.random.default_rng(width)
    query, key, value = (draw.normal(size=(2, width, heads, 4)) for heads in (4, 2, 2))
    segment = np.sort(draw.integers(1, 4, size=(2, width)), axis=1)
    segment[1, -width // 3 :] = 0  # padding
    return query, key, value, segment


def as_one_chunk(query, key, value, segment):
    return attend_chunk(query, key, value, lambda start: (key, value), jnp.int32(0))


@pytest.mark.parametrize("attend", [attention_xla.attend_blocks, as_one_chunk])
def test_scores_in_16_bits_are_off_by_chance_and_not_all_to_one_side(attend):
    """Two tokens, whose scores differ by the second's share of the first; the root has no 16 bits."""
    query, key = np.random.default_rng(0).normal(size=(2, 3000, 2, 1, 96))
    query, key = jnp.asarray(query / 2, jnp.bfloat16), jnp.asarray(key, jnp.bfloat16)
    value = jnp.broadcast_to(jnp.eye(2)[:, None], (3000, 2, 1, 2))
    share_R = np.asarray(jax.jit(attend)(query, key, value, jnp.ones((3000, 2), jnp.int32)), np.float64)[:, 1, 0, 0]
    found_R = np.log(share_R / (1 - share_R))
    wide_RH, away_RSH = np.asarray(query, np.float64)[:, 1, 0], np.asarray(key, np.float64)[:, :, 0]
    true_R = np.einsum("RH,RH->R", wide_RH, away_RSH[:, 0] - away_RSH[:, 1]) / np.sqrt(96)
    assert abs(found_R @ true_R / (true_R @ true_R) - 1) < 3e-4


IMAGES = np.array([0] * 20 + [1] * 30 + [0] * 40 + [2] * 10 + [0] * 50)
SINKS = jnp.asarray([0.3, -1.0, 2.0, 0.0])


def as_written(query_RWNH, key_RWKH, value_RWKU, segment_RW, score_mod, image_RW=None):
    """The softmax over all pairs of a row, with a mask as long as it in both directions."""
    rows, width, heads, head_dim = query_RWNH.shape
    key_RWNH, value_RWNU = (jnp.repeat(array, heads // array.shape[2], axis=2) for array in (key_RWKH, value_RWKU))
    score_RNWS = jnp.einsum("RWNH,RSNH->RNWS", query_RWNH, key_RWNH) / score_mod.divide_by(head_dim)
    if score_mod.soft_cap is not None:
        score_RNWS = score_mod.soft_cap * jnp.tanh(score_RNWS / score_mod.soft_cap)
    ago_WS = np.arange(width)[:, None] - np.arange(width)
    seen_RWS = np.broadcast_to(ago_WS >= 0, (rows, width, width))
    if image_RW is not None:
        seen_RWS = seen_RWS | (image_RW[:, :, None] == image_RW[:, None]) & (image_RW[:, :, None] > 0)
    if score_mod.window is not None:
        everywhere = False if score_mod.slides is None else ~score_mod.slides
        seen_RWS = seen_RWS & ((ago_WS < score_mod.window) | everywhere)[None]
    seen_RWS = seen_RWS & (segment_RW[:, :, None] == segment_RW[:, None])
    score_RNWS = jnp.where(seen_RWS[:, None], score_RNWS, -jnp.inf)
    if score_mod.sink_N is not None:
        sink_RNW1 = jnp.broadcast_to(score_mod.sink_N[None, :, None, None], (rows, heads, width, 1))
        score_RNWS = jnp.concatenate([score_RNWS, sink_RNW1], axis=-1)
    weight_RNWS = jax.nn.softmax(score_RNWS, axis=-1)[..., :width]
    return jnp.einsum("RNWS,RSNU->RWNU", weight_RNWS, value_RWNU)


IMAGES_RW = jnp.asarray(np.stack([IMAGES, np.roll(IMAGES, 7)]), jnp.int32)
SCORES = {
    "plain": [ScoreMod()],
    "capped": [ScoreMod(divisor=3.0, soft_cap=1.5)],
    "window": [ScoreMod(window=20)],
    "flag": [ScoreMod(window=40, slides=jnp.asarray(slides), sink_N=SINKS) for slides in (True, False)],
    "images": [ScoreMod()],
    "images and everything": [ScoreMod(window=20, sink_N=SINKS)],
}


def values_and_gradients(attend, name):
    """By each of the scores of a name, which one program computes; values are wider than keys."""
    *rows, segment = random_rows(150)
    query, key, value = (jnp.asarray(array, jnp.float32) for array in rows)
    arrays = 2 * query, key, jnp.concatenate([value, value**2], axis=-1)

    image_RW = IMAGES_RW if "images" in name else None
    segment_RW = jnp.asarray(segment) if image_RW is None else jnp.where(image_RW > 0, 1, segment)

    def total(query, key, value, sink_N, score_mod):
        out = attend(query, key, value, segment_RW, replace(score_mod, sink_N=sink_N), image_RW)
        return jnp.sum(out**3), out

    of = (0, 1, 2) if SCORES[name][0].sink_N is None else (0, 1, 2, 3)
    run = jax.jit(jax.grad(total, of, has_aux=True))
    return [run(*arrays, score_mod.sink_N, score_mod) for score_mod in SCORES[name]]


as_it_is_written = functools.cache(functools.partial(values_and_gradients, as_written))


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("long", [False, True], ids=["blocks", "tiles"])
def test_values_and_gradients_are_those_of_the_softmax_as_written(monkeypatch, name, long):
    """Tiles of 16 do not divide the row."""
    monkeypatch.setattr(attention_xla, "LONG_ROW", 1 if long else 1000)
    monkeypatch.setattr(attention_xla, "TILE", 16)
    found = values_and_gradients(attention_xla.attend_blocks, name)
    for (gradients, out), (expected_gradients, expected) in zip(found, as_it_is_written(name), strict=True):
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
        for gradient, other in zip(gradients, expected_gradients, strict=True):
            np.testing.assert_allclose(gradient, other, rtol=1e-4, atol=1e-4)


def visited(segment_RW, score_mod, own_RW=None):
    """First query and first key of each visited tile."""
    places = attention_xla._Places(segment_RW, own_RS=own_RW)
    query_V, key_V, count = attention_xla._visits(places, score_mod, 16)
    return sorted(zip(query_V[:count].tolist(), key_V[:count].tolist(), strict=True))


def test_tiles_that_no_query_sees_are_not_computed():
    segment_RW = np.ones((1, 160), np.int32)
    assert len(visited(segment_RW, ScoreMod())) == 55
    seen = [(at // 16, max(at - back, 0) // 16) for at in range(160) for back in range(18)]
    assert visited(segment_RW, ScoreMod(window=18)) == sorted({(16 * q, 16 * k) for q, k in seen})


@pytest.mark.parametrize("lengths", [[(160,)], [(40, 70)], [(16, 16, 16)], [(5, 3, 90, 20)], [(100, 60), (30, 120)]])
def test_tiles_of_other_segments_are_not_computed(lengths):
    rows = [np.repeat(np.arange(len(row) + 1), [0, *row]) for row in lengths]
    segment_RW = np.stack([np.pad(row, (0, 160 - len(row))).astype(np.int32) for row in rows])
    tokens = [(r, q, k) for r in range(len(rows)) for q in range(160) for k in range(q + 1)]
    seen = {(q // 16, k // 16) for r, q, k in tokens if segment_RW[r, q] == segment_RW[r, k] > 0}
    # Padding sees itself, so that no sum of weights is zero.
    assert visited(segment_RW, ScoreMod()) == sorted({(16 * q, 16 * k) for q, k in seen | {(n, n) for n in range(10)}})


@pytest.mark.parametrize(
    "groups", [[(30, 20, 20)], [(5, 40, 40), (9, 20, 20, 10)], [(16, 16, 16)], [(60, 3, 3, 3), (1, 70)]]
)
def test_tiles_of_other_responses_to_a_prompt_are_not_computed(groups):
    """A group is the tokens of its prompt, then of each response."""
    group_W, own_W, sequences = [], [], 0
    for number, (prompt, *responses) in enumerate(groups, 1):
        group_W += [number] * (prompt + sum(responses))
        own_W += [0] * prompt
        for tokens in responses:
            sequences += 1
            own_W += [sequences] * tokens
    group_W, own_W = (np.pad(each, (0, 160 - len(each))).astype(np.int32) for each in (group_W, own_W))
    seen = {(n, n) for n in range(10)}
    for q in range(160):
        for k in range(q + 1):
            if group_W[q] == group_W[k] > 0 and own_W[k] in (0, own_W[q]):
                seen.add((q // 16, k // 16))
    assert visited(group_W[None], ScoreMod(), own_W[None]) == sorted((16 * q, 16 * k) for q, k in seen)


def test_memory_of_a_long_row_grows_with_the_row():
    """Twice the tokens take twice the temporaries of forward and backward; layers are computed again."""

    def temporary(width):
        shape = jax.ShapeDtypeStruct((1, width, 4, 8), jnp.float32)
        segment = jax.ShapeDtypeStruct((1, width), jnp.int32)

        def loss(query, key, value, segment):
            @jax.checkpoint
            def layer(hidden, _):
                return attention_xla.attend_blocks(hidden, key, value, segment), None

            return jax.lax.scan(layer, query, length=3)[0].sum()

        program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape, segment).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporary(16_384) < 2.1 * temporary(8192)


@pytest.mark.parametrize("width", [1, 63, 64, 100, 513, 4096, 5000])
def test_blocks_cover_a_row_once_and_are_few(width):
    blocks = attention_xla._blocks(width)
    assert [position for start, end in blocks for position in range(start, end)] == list(range(width))
    assert len(blocks) <= 8


def test_no_array_is_as_long_as_a_row_in_both_directions():
    width = attention_xla.LONG_ROW - 1
    shape = jax.ShapeDtypeStruct((1, width, 2, 8), jnp.float32)
    segment = jax.ShapeDtypeStruct((1, width), jnp.int32)

    def loss(query, key, value, segment):
        return attention_xla.attend_blocks(query, key, value, segment).sum()

    program = to_read(jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape, segment))
    assert f"{width}," in program.as_text() and f"{width},{width}]" not in program.as_text()


def test_layers_that_are_computed_again_do_not_compute_their_tiles_again():
    """The loop over tiles of the forward pass is there once more if nothing is kept."""
    width = attention_xla.LONG_ROW
    array, segment_RW = np.ones((1, width, 2, 8), np.float32), np.ones((1, width), np.int32)

    def loops(**policy):
        def layer(array, factor):
            return jnp.sin(attention_xla.attend_blocks(factor * array, array, array, segment_RW)), None

        def total(array, factor_L):
            return jax.lax.scan(jax.checkpoint(layer, prevent_cse=False, **policy), array, factor_L)[0].sum()

        jaxpr = jax.make_jaxpr(jax.grad(total))(array, np.ones(3, np.float32))
        return str(jaxpr).count(" while[")

    kept = jax.checkpoint_policies.save_only_these_names(attention_xla.ATTENDED)
    assert loops() == loops(policy=kept) + 1
