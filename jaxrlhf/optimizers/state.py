"""Optimizer state: its layout and its size."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.batch import Params
from jaxrlhf.config import Optimizer
from jaxrlhf.optimizers.groups import Layers, ParameterGroups
from jaxrlhf.optimizers.optimizer import optimizer_of


def state_layout(state: Any, shapes: Params, layout: Params, whole: Any) -> Any:
    """Return the shardings of an optimizer's state.

    The path of a state array ends in the path of its parameter. A state array with the shape of its parameter gets the
    parameter's sharding. Other arrays get `whole`: counts, and sums over rows and columns, which are small.

    Args:
      whole: Sharding that replicates an array on every device.
    """
    layouts, params = (dict(jax.tree.leaves_with_path(tree)) for tree in (layout, shapes))

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        end = next((path[start:] for start in range(len(path)) if path[start:] in layouts), None)
        return layouts[end] if end is not None and leaf.shape == params[end].shape else whole

    return jax.tree.map_with_path(one, state)


def state_bytes_per_weight(settings: Optimizer, declared: Params, layers: Layers) -> float:
    """Return the bytes of optimizer state per weight, averaged over the weights of `declared`; without counts."""
    groups = ParameterGroups.of(settings, declared, layers)
    shapes = jax.tree.map(lambda param: jax.ShapeDtypeStruct(param.shape, jnp.float32), declared)
    state = jax.eval_shape(optimizer_of(settings, declared, groups, total_updates=1).init, shapes)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.shape)
    return kept / sum(leaf.size for leaf in jax.tree.leaves(shapes))
