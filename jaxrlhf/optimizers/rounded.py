"""Optimizers with bfloat16 state, rounded stochastically.

With beta2 = 0.999 an update changes the second moment by a thousandth of itself, and neighbors in bfloat16 are up to
a 128th apart: rounded to nearest, the second moment would never change. Stochastic rounding changes the moment by the
right amount on average.
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
      updates: int32, number of updates made; seeds the random bits of the rounding.
      state: State of the optimizer, with float32 arrays in bfloat16.
    """

    updates: Int[Array, ""]
    state: Any


def rounded(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the optimizer, computing in float32 and keeping its float32 arrays in bfloat16.

    The random bits depend only on the number of the update and the position of an entry in the state, so a run
    is repeated and resumed bitwise on any devices.
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
    """Round each finite number to one of its two bfloat16 neighbors, without bias.

    The probability of rounding away from 0 is the part of the gap between the neighbors that truncation would lose.

    Args:
      bits: Uniform random bits.
    """
    # A bfloat16 is the upper half of a float32. Adding `bits` to the lower half carries with this probability.
    whole = jax.lax.bitcast_convert_type(array, jnp.uint32) + bits.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type((whole >> 16).astype(jnp.uint16), jnp.bfloat16)


def _kept(leaf: Array) -> Any:
    return jnp.bfloat16 if leaf.dtype == jnp.float32 else leaf.dtype


def _computed(leaf: Array) -> Array:
    return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf
