"""Shared-prefix attention is attention over each sequence by itself."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_arrays import PackedArrays

from jaxrlhf.batch import Sequences
from jaxrlhf.models.attention.attention_xla import SharedTokens
from jaxrlhf.models.attention.mask import Heads
from jaxrlhf.models.attention.score_mod import ScoreMod
from jaxrlhf.models.attention.shared_prefix import ATTENDED, AttentionRows, SharedPrefix

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def responses(seed: int, *, prompt: int = 110, response: int = 270) -> Sequences:
    """Twelve to each of three prompts."""
    draw = np.random.default_rng(seed)
    prompt_id_B = np.repeat(np.arange(3), 12)
    prompt_B = draw.integers(prompt - 50, prompt, 3)[prompt_id_B]
    length_B = prompt_B + draw.integers(1, response, 36)
    mask_BT = np.arange(prompt + response + 4) >= prompt_B[:, None]
    token_BT = np.where(mask_BT, draw.integers(0, 99, mask_BT.shape), prompt_id_B[:, None])
    return Sequences(token_BT, length_B.astype(np.int32), mask_BT, prompt_id_B)


def random_array(shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def naive_rows(query, key, value, place_BS, inside_BS, window):
    """Each sequence by itself, from its places in the packed row; places past the row are padding."""
    query, key, value = (array[0].at[place_BS].get(mode="fill", fill_value=0) for array in (query, key, value))
    key, value = (jnp.repeat(array, HEADS // KV_HEADS, axis=2) for array in (key, value))
    ago_SS = np.arange(place_BS.shape[1])[:, None] - np.arange(place_BS.shape[1])
    score_BNSS = jnp.einsum("BSNH,BTNH->BNST", query, key) / np.sqrt(WIDTH)
    seen_BSS = ((ago_SS >= 0) & (ago_SS < window))[None] & inside_BS[:, None, :]
    weight_BNSS = jax.nn.softmax(jnp.where(seen_BSS[:, None], score_BNSS, -1e30), axis=-1)
    return jnp.einsum("BNST,BTNH->BSNH", weight_BNSS, value)


def places_of(rows):
    """Places in the packed row of every sequence, padded by places past the row."""
    position_W, segment_W = rows.position_RW[0], rows.segment_RW[0]
    whole = []
    for part in rows.shared_prefix.parts:
        for source_S, segment_S in zip(part.source_RAS[0], part.segment_RAS[0], strict=True):
            whole += [source_S[segment_S == segment] for segment in sorted(set(segment_S) - {0})]
    for places in whole:
        np.testing.assert_array_equal(position_W[places], np.arange(len(places)))
        assert (segment_W[places] > 0).all()
    place_BS = np.full((36, max(map(len, whole))), len(position_W))
    for index, places in enumerate(whole):
        place_BS[index, : len(places)] = places
    return place_BS


@partial(jax.jit, static_argnames="window")
def both(arrays, weight, shared, place_BS, *, window=None):
    """Results and gradients of packed rows, and of each sequence by itself."""
    inside_BS = place_BS < weight.shape[1]

    def ours(*arrays):
        return shared.attend(Heads(*arrays), ScoreMod(window=window))

    def expected(*arrays):
        mixed = naive_rows(*arrays, place_BS, inside_BS, window or 10**6)
        return jnp.zeros_like(arrays[0]).at[0, place_BS].set(mixed, mode="drop")

    return [(function(*arrays), jax.vjp(function, *arrays)[1](weight)) for function in (ours, expected)]


def test_results_and_gradients_are_those_of_each_sequence_alone() -> None:
    batches = list(PackedArrays(responses(2), rows=14, row_tokens=384).rows())
    used = [part.used_R.max() for part in batches[0].shared_prefix.parts]
    assert used[0] > 4 and used[1] > 2  # more than a loop takes at a time
    for index, rows in enumerate(batches):
        size = rows.token_RW.shape[1]
        arrays = [
            random_array((1, size, heads, WIDTH), index + n) for n, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
        ]
        weight = random_array((1, size, HEADS, WIDTH), 9) * (rows.segment_RW > 0)[:, :, None, None]
        found, expected = both(arrays, weight, rows.shared_prefix, places_of(rows))
        for ours, naive in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, naive, atol=3e-5)


def test_long_prompts_attend_once_for_all_their_responses() -> None:
    """Several prompts are in one row, with padding behind them; a window counts positions and not places.

    Responses see a part of their prompt.
    """
    sequences, sizes = responses(3, prompt=300, response=8), {"rows": 4, "row_tokens": 312, "longest_response": 7}
    whole, rows = (next(PackedArrays(sequences, **sizes, in_rows=in_rows).rows()) for in_rows in (False, True))
    assert isinstance(rows.shared_prefix, SharedTokens) and isinstance(whole.shared_prefix, SharedPrefix)
    np.testing.assert_array_equal(rows.token_RW, whole.token_RW)
    size, inside_W = rows.token_RW.shape[1], rows.segment_RW[0] > 0
    assert rows.shared_prefix.group_RW.max() > 1 and not inside_W.all()
    arrays = [random_array((1, size, heads, WIDTH), n) for n, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    weight = random_array((1, size, HEADS, WIDTH), 9) * inside_W[None, :, None, None]
    found, expected = both(arrays, weight, rows.shared_prefix, places_of(whole), window=150)
    for ours, naive in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours[0, inside_W], naive[0, inside_W], atol=3e-5)


def test_responses_longer_than_their_prompts_are_attended_to_one_by_one() -> None:
    sizes = {"rows": 14, "row_tokens": 384, "longest_response": 270}
    assert isinstance(next(PackedArrays(responses(2), **sizes, in_rows=True).rows()).shared_prefix, SharedPrefix)


def test_rows_that_are_not_used_are_not_computed() -> None:
    rows = next(PackedArrays(responses(2), rows=14, row_tokens=384).rows())
    narrow, wide = rows.shared_prefix.parts
    arrays = [np.ones((1, rows.token_RW.shape[1], heads, WIDTH), np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    run = jax.jit(lambda shared: shared.attend(Heads(*arrays)))
    both = run(rows.shared_prefix)
    np.testing.assert_allclose(both[rows.segment_RW > 0], 1, rtol=1e-6)
    assert not both[rows.segment_RW == 0].any()
    none = SharedPrefix((narrow, wide._replace(used_R=np.zeros(1, np.int32))))
    told_W = np.zeros(rows.token_RW.shape[1], bool)
    told_W[narrow.source_RAS[0][narrow.is_primary_RAS[0]]] = True
    assert not np.asarray(run(none))[0, ~told_W].any() and told_W.any()


@pytest.mark.slow
def test_layers_that_are_computed_again_do_not_attend_again() -> None:
    ones = [np.ones((1, 4, width), np.int32) for width in (32, 64)]
    shared = SharedPrefix(tuple(AttentionRows(0 * each, each, each > 0, np.ones(1, np.int32)) for each in ones))
    array = np.ones((1, 64, KV_HEADS, WIDTH), np.float32)

    def loops(**policy):
        def layer(array, factor, shared_prefix):
            return jnp.sin(shared_prefix.attend(Heads(factor * array, array, array))), None

        def total(array, factor_L, shared_prefix):
            body = jax.checkpoint(lambda *carry: layer(*carry, shared_prefix), prevent_cse=False, **policy)
            return jax.lax.scan(body, array, factor_L)[0].sum()

        program = jax.jit(jax.grad(total)).lower(array, np.ones(3, np.float32), shared)
        # The older emitters of conftest.py make loops of scatters too; JAX 0.12 has the newer ones alone.
        newer = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 12) else {}
        return program.compile(newer).as_text().count(" while(")

    kept = jax.checkpoint_policies.save_only_these_names(ATTENDED)
    # Over layers and, inside, over chunks of two widths: forward, backward, and again if nothing is kept.
    assert (loops(policy=kept), loops()) == (2 + 4, 2 + 6)
