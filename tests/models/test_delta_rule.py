"""The gated delta rule, or a state space, in chunks is what it is token by token."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.models.attention.delta_rule import Steps, in_chunks, one_step, unit

ROWS, WIDTH, CUTS = 2, 150, ((20, 70), (128, 129))
"""Three segments of each row: they end inside of chunks of 64, at the end of one, and after one token."""


def random_steps():
    draw = np.random.default_rng(0).standard_normal
    heads, group, key_dim, value_dim = 2, 3, 8, 5
    query, key = (unit(draw((ROWS, WIDTH, heads, key_dim), np.float32)) for _ in range(2))
    # Keys that hardly differ and rates near 1, for which inverses by series of powers would fail.
    key = unit(key + 2.0)
    value = draw((ROWS, WIDTH, heads, group, value_dim), np.float32)
    decay = -np.exp(draw((ROWS, WIDTH, heads, group), np.float32) - 3)
    rate = 1 / (1 + np.exp(-2 - draw((ROWS, WIDTH, heads, group), np.float32)))
    return Steps(query, key, value, decay, rate)


@partial(jax.jit, static_argnames=("corrects",))
def one_by_one(steps, segment_RW, state, *, corrects):
    def step(state, given):
        steps, first_R = given
        mixed, state = one_step(jnp.where(first_R[:, None, None, None, None], 0.0, state), steps, corrects=corrects)
        return state, mixed[:, 0]

    first_RW = jnp.diff(segment_RW, axis=1, prepend=segment_RW[:, :1]) != 0
    given = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), (steps, first_RW))
    given = jax.tree.map(lambda leaf: leaf[:, :, None], given[0]), given[1]
    state, mixed_WRKGU = jax.lax.scan(step, state, given)
    return jnp.swapaxes(mixed_WRKGU, 0, 1), state


@pytest.mark.parametrize("corrects", [True, False], ids=["delta rule", "state space"])
def test_chunks_and_tokens_give_the_same_values_states_and_gradients(corrects):
    steps = random_steps()
    place_W = np.arange(WIDTH)
    segment_RW = np.array([1 + sum(place_W >= cut for cut in cuts) for cuts in CUTS], np.int32)
    state = np.random.default_rng(1).standard_normal((ROWS, 2, 3, 8, 5), np.float32)

    def total(function):
        def weighed(steps, state):
            mixed, last = function(steps, segment_RW, state, corrects=corrects)
            return (mixed * jnp.cos(jnp.arange(mixed.size)).reshape(mixed.shape)).sum() + last.sum(), (mixed, last)

        return jax.jit(jax.grad(weighed, argnums=(0, 1), has_aux=True))(steps, state)

    for ours, exact in zip(jax.tree.leaves(total(in_chunks)), jax.tree.leaves(total(one_by_one)), strict=True):
        np.testing.assert_allclose(ours, exact, atol=2e-5 * np.abs(exact).max())
