"""Rows that devices split between them: shapes of microbatches, and layouts that cannot be."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_arrays import PackedArrays
from tiny_models import DECODER

from jaxrlhf.batch import Sequences
from jaxrlhf.batching.microbatch import packed_row_tokens
from jaxrlhf.config import Layout
from jaxrlhf.models.config import Sections, Vision
from jaxrlhf.sharding.mesh import factored_mesh
from jaxrlhf.workers.role_weights import RoleWeights


def weights(**changes) -> RoleWeights:
    return RoleWeights("critic", replace(DECODER, **changes), "value", jnp.float32, None)


def test_fewer_heads_than_devices_that_split_rows_are_refused(refused) -> None:
    """Four heads: neither more devices nor as many with tensor shards beside them."""
    for layout in (Layout(context=8), Layout(context=4, tensor=2)):
        with refused():
            weights().layout(factored_mesh(layout, jax.devices()))
    weights(num_heads=6, num_kv_heads=6).layout(factored_mesh(Layout(context=4), jax.devices()))  # as eight, two empty
    weights(num_heads=6, num_kv_heads=6).layout(factored_mesh(Layout(context=8), jax.devices()))  # two have none


def test_rows_with_pictures_are_not_split(refused) -> None:
    seeing = Vision("qwen2_5_vl", 90, 16, 24, 2, 2, 2, 32, frames=2, norm="rms", sections=Sections((2, 1, 1)))
    with refused():
        weights(vision=seeing).layout(factored_mesh(Layout(context=2), jax.devices()))


def test_a_mesh_that_is_not_filled_is_refused(refused) -> None:
    with refused():
        factored_mesh(Layout(data=1, context=4), jax.devices())


@pytest.mark.parametrize(("longest", "context"), [(384, 4), (383, 8), (250, 3)])
def test_rows_split_evenly_and_hold_the_longest_sequence(longest: int, context: int) -> None:
    row_tokens = packed_row_tokens(longest, budget=4096, token_shards=context)
    assert row_tokens % context == 0 and longest <= row_tokens < longest + context
    draw = np.random.default_rng(0)
    prompt_id_B = np.repeat(np.arange(2), 12)
    length_B = draw.integers(longest // 2, longest + 1, 24).astype(np.int32)
    mask_BT = np.arange(longest) >= longest // 3
    sequences = Sequences(np.ones((24, longest), np.int32), length_B, np.tile(mask_BT, (24, 1)), prompt_id_B)
    for shares in (True, False):
        packing = PackedArrays(
            sequences, rows=4, row_tokens=row_tokens, longest_response=2 * longest // 3, shares=shares,
            token_shards=context,
        )  # fmt: skip
        for rows in packing.rows():
            assert rows.token_RW.shape[1] % context == 0
            assert (rows.shared_prefix is not None) == shares
        np.testing.assert_array_equal(
            packing.unpack(packing.pack(length_B[:, None] * mask_BT[None])) > 0,
            sequences.mask_BT & (np.arange(longest) < length_B[:, None]),
        )
