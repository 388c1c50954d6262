"""Average of the weights over updates, as the last part of an optimizer: its state is saved, split and moved as moments
are."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrlhf.batch import Params


class AverageState(NamedTuple):
    """State of the average.

    Attributes:
      average: Tree of the weights' shapes and dtypes.
    """

    average: Params


def averaging(decay: float) -> optax.GradientTransformation:
    """A part of an optimizer behind all that changes its updates: `average = decay * average + (1 - decay) * weights`.

    The average begins as the weights that are there before the first update.
    """

    def init(params: Params) -> AverageState:
        return AverageState(jax.tree.map(jnp.array, params))

    def update(changes: Params, state: Any, params: Params | None = None) -> tuple[Params, AverageState]:
        assert params is not None, "an average is of weights"
        moved = optax.apply_updates(params, changes)
        average = jax.tree.map(lambda old, new: old + (1 - decay) * (new - old), state.average, moved)
        return changes, AverageState(average)

    return optax.GradientTransformation(init, update)


def place_of(names: Any) -> str | None:
    """Path of the average among the names of a saved state, such as `2.average`; None if there is none."""
    places = {name.partition(".average.")[0] for name in names if ".average." in name}
    return f"{places.pop()}.average" if len(places) == 1 else None
