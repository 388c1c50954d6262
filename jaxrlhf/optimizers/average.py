"""Exponential moving average of the weights, as the last part of an optimizer.

The average is optimizer state, so it is saved, sharded and moved like the moments.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrlhf.batch import Params


class AverageState(NamedTuple):
    """State of the average.

    Attributes:
      average: Averaged weights, a tree with the structure, shapes and dtypes of the weights.
    """

    average: Params


def averaging(decay: float) -> optax.GradientTransformation:
    """Return an optimizer part that keeps `average = decay * average + (1 - decay) * weights`.

    Chain it after every part that changes the updates. The average starts as the weights before the first update.
    """

    def init(params: Params) -> AverageState:
        return AverageState(jax.tree.map(jnp.array, params))

    def update(changes: Params, state: Any, params: Params | None = None) -> tuple[Params, AverageState]:
        assert params is not None, "an average requires weights"
        moved = optax.apply_updates(params, changes)
        average = jax.tree.map(lambda old, new: old + (1 - decay) * (new - old), state.average, moved)
        return changes, AverageState(average)

    return optax.GradientTransformation(init, update)


def place_of(names: Any) -> str | None:
    """Return the path of the average among the names of a saved state, such as `2.average`; None if there is none."""
    places = {name.partition(".average.")[0] for name in names if ".average." in name}
    return f"{places.pop()}.average" if len(places) == 1 else None
