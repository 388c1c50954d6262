"""Optimizers whose state is kept in bfloat16, rounded at random.

With beta2 = 0.999 an update changes the second moment by a thousandth of itself, and neighbours in bfloat16 are up to
a 128th apart: rounded to the nearest it would never move. Rounded up with the probability of what lies below, it moves
by the right amount on average.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import BFloat16, Float32, Int, UInt16

from jaxrlhf.batch import Array, Params


class RoundedState(NamedTuple):
    """State of an optimizer in bfloat16.

    Attributes:
      updates: int32 updates made, which numbers are rounded by.
      state: The optimizer's own, its float32 arrays in bfloat16.
    """

    updates: Int[Array, ""]
    state: Any


def rounded(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, computing in float32 and keeping its float32 arrays in bfloat16.

    What is drawn depends on the number of the update and on an entry's place in its array alone, so that a run is
    repeated and resumed bitwise on any devices.
    """

    def init(params: Params) -> RoundedState:
        state = jax.tree.map(lambda leaf: leaf.astype(_kept(leaf)), optimizer.init(params))
        return RoundedState(jnp.zeros((), jnp.int32), state)

    def update(changes: Params, state: Any, params: Params | None = None) -> tuple[Params, RoundedState]:
        changes, exact = optimizer.update(changes, jax.tree.map(_computed, state.state), params)
        leaves, structure = jax.tree.flatten(exact)
        key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), state.updates)
        kept = [
            stochastically_rounded(leaf, jax.random.bits(jax.random.fold_in(key, index), leaf.shape, jnp.uint16))
            if _kept(leaf) != leaf.dtype
            else leaf
            for index, leaf in enumerate(leaves)
        ]
        return changes, RoundedState(state.updates + 1, jax.tree.unflatten(structure, kept))

    return optax.GradientTransformation(init, update)


def stochastically_rounded(array: Float32[Array, "*shape"], bits: UInt16[Array, "*shape"]) -> BFloat16[Array, "*shape"]:
    """One of the two neighbours in bfloat16 of each finite number: the one farther from 0 by the share that lies below.

    Args:
      bits: Random bits, uniform.
    """
    # A bfloat16 is the upper half of a float32, whose lower half carries with this probability.
    whole = jax.lax.bitcast_convert_type(array, jnp.uint32) + bits.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type((whole >> 16).astype(jnp.uint16), jnp.bfloat16)


def _kept(leaf: Array) -> Any:
    return jnp.bfloat16 if leaf.dtype == jnp.float32 else leaf.dtype


def _computed(leaf: Array) -> Array:
    return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf
