"""Parameter groups with a separate learning rate, or frozen: selected by name, and by layer if layers are stacked."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf.batch import Params
from jaxrlhf.config import Optimizer, ParameterGroup, Refusal
from jaxrlhf.models import AnyModel
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.parameters import VISION, Param, path_name

Layers = Mapping[str, Sequence[int]]
"""Numbers of the decoder layers in each stack, by the name of the stack."""


def layers_of(model: AnyModel) -> Layers:
    """Return the layers in each stack of a model; empty for a user's own model, which has no stacked parameters."""
    if not isinstance(model, ModelConfig):
        return {}
    stack_of = model.pattern.stack_of()
    return {name: [index for index, other in enumerate(stack_of) if other == name] for name in dict.fromkeys(stack_of)}


@dataclass(frozen=True)
class ParameterGroups:
    """Learning rates of parameters, relative to the optimizer's learning rate.

    Attributes:
      share: Learning rate of each parameter divided by the optimizer's learning rate; 0 is frozen. Tree of float32
        arrays that broadcast with the parameters.
    """

    share: Any

    @classmethod
    def of(cls, settings: Optimizer, declared: Params, layers: Layers) -> "ParameterGroups":
        """Build the groups of the settings. The first group that names a parameter applies; a vision tower is the last.

        Fixed parameters are in no group, and frozen.

        Args:
          declared: Tree of `Param` of the trained parameters.

        Raises:
          Refusal: A group names no parameter or no layer, or all parameters are frozen.
        """
        tower = ParameterGroup(rf"^{VISION}\.", learning_rate=settings.vision_learning_rate)
        leaves = jax.tree.leaves_with_path(declared)
        names = [path_name(path) for path, _ in leaves]
        shares = [np.full(_places(param), 0 if param.fixed else np.nan, np.float32) for _, param in leaves]
        for group in (*settings.groups, tower):
            named = 0
            for name, share in zip(names, shares, strict=True):
                if re.search(group.pattern, name) is None or (group.layers and name.partition(".")[0] not in layers):
                    continue
                chosen = np.ones_like(share, bool)
                if group.layers is not None:
                    numbers = layers[name.partition(".")[0]]
                    chosen = np.isin(numbers, range(_total(layers))[slice(*group.layers)]).reshape(share.shape)
                named += int(chosen.sum())
                rate = 0.0 if group.learning_rate is None else group.learning_rate / settings.learning_rate
                share[chosen & np.isnan(share)] = rate
            if not named and group is not tower:
                raise Refusal(_names_nothing(group, names, _total(layers)))
        shares = [np.where(np.isnan(share), np.float32(1), share) for share in shares]
        if not any(share.any() for share in shares):
            raise Refusal("Optimizer.groups freezes every parameter, so nothing is trained; remove a group")
        return cls(jax.tree.unflatten(jax.tree.structure(declared), shares))

    @property
    def frozen(self) -> Any:
        """Tree of bools: whether a parameter is entirely frozen."""
        return jax.tree.map(lambda share: not share.any(), self.share)

    @property
    def freeze(self) -> bool:
        """True if any parameter is entirely frozen."""
        return any(jax.tree.leaves(self.frozen))

    @property
    def alike(self) -> bool:
        """True if every parameter is either entirely frozen or has the optimizer's learning rate."""
        return all((share == 1).all() or not share.any() for share in jax.tree.leaves(self.share))

    def scaled(self, changes: Params) -> Params:
        """Scale the update of each parameter by its share."""
        return jax.tree.map(lambda change, share: change if (share == 1).all() else change * share, changes, self.share)

    def without_frozen_gradients(self, trained: Params) -> Params:
        """Return the parameters, with gradients stopped at frozen parameters."""

        def one(weight: Any, share: np.ndarray) -> Any:
            if share.all():
                return weight
            fixed = jax.lax.stop_gradient(weight)
            return jnp.where(share > 0, weight, fixed) if share.any() else fixed

        return jax.tree.map(one, trained, self.share)


def _places(param: Param) -> tuple[int, ...]:
    """Return the shape of a parameter's shares: one share per layer if layers are stacked, else a scalar."""
    return (param.shape[0], *[1] * (len(param.shape) - 1)) if param.shape and param.stacked else ()


def _total(layers: Layers) -> int:
    return sum(map(len, layers.values()))


def _names_nothing(group: ParameterGroup, names: Sequence[str], layers: int) -> str:
    among = f" of layers {group.layers}, where the model has {layers}" if group.layers is not None else ""
    return f"Optimizer.groups: {group.pattern!r} matches no name{among}; the parameters are {', '.join(names)}"
