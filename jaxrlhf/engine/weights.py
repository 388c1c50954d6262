"""Weights of an engine: layers stacked as in training, and unstacked as decoding reads them."""

from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrlhf import models
from jaxrlhf.batch import Params
from jaxrlhf.engine import programs
from jaxrlhf.engine.buckets import Shape
from jaxrlhf.engine.compiled import Compiled
from jaxrlhf.models import AnyModel
from jaxrlhf.models.config import STACKS, ModelConfig


def donated_layers(config: AnyModel, donated: Any) -> Any:
    """Return `donated` of `Engine.load` if it marks a leaf of stacked layers; else None."""
    if donated is None or not isinstance(config, ModelConfig):
        return None
    return donated if any(jax.tree.leaves([donated[name] for name in STACKS if name in donated])) else None


class Weights:
    """One version of the weights on the devices.

    Args:
      donated: Result of `donated_layers`; None keeps the stack.

    Attributes:
      params: All weights; without the layers if the stack was deleted.
      stackless: Unstacked layers whose stack was deleted; None if the stack is kept.
    """

    def __init__(self, compiled: Compiled, params: Params, version: int, *, donated: Any = None) -> None:
        self._compiled, self.params, self.version = compiled, params, version
        self.stackless: list[Params] | None = None
        self._layers: list[Params] | None = None
        if donated is not None:
            self.stackless = self._taken_apart(donated)
            self.params = {name: tree for name, tree in params.items() if name not in STACKS}

    def layers(self) -> list[Params]:
        """Return the unstacked layers that `decode` reads."""
        if self.stackless is not None:
            return self.stackless
        if self._layers is None:
            self._layers = self._unstacked(self.params, "all")
        return self._layers

    def drop_copies(self) -> None:
        """Free the unstacked copies of layers that also have their stack."""
        self._layers = None

    def _taken_apart(self, donated: Any) -> list[Params]:
        """Unstack the layers and delete their donated leaves, part by part, so that only one part exists twice."""
        made = []
        parts = zip(models.layer_parts(self.params), models.layer_parts(donated), strict=True)
        for number, (part, gone) in enumerate(parts):
            made.append(self._unstacked(part, number))
            if self._compiled.has_devices:
                jax.block_until_ready(made[-1])  # before its source is deleted, and before the next part is allocated
                jax.tree.map(lambda leaf, is_donated: leaf.delete() if is_donated else None, part, gone)
        return models.joined_parts(made)

    def _unstacked(self, params: Params, part: int | str) -> list[Params]:
        """Unstack the layers of a part, by one program for each stack."""
        compiled, shape = self._compiled, self._compiled.shape
        if not isinstance(shape.config, ModelConfig):
            return compiled.run(("unstack", part), programs.unstack, params, out=None)
        layers, of_stack = [], dict[str, Params]()
        for name, place in models.layer_places(shape.config, shape.execution.stages):
            if compiled.has_devices or name not in of_stack:
                program = partial(_unstack_layer, name=name)
                of_stack[name] = compiled.run(("unstack", part, name), program, params, np.int32(place), out=None)
            layers.append(of_stack[name])
        return layers


def _unstack_layer(params: Params, place: jax.Array, *, name: str, shape: Shape) -> Params:
    """Unstack one layer of a stack: the program of all layers of a stack compiles as fast as that of one layer."""
    assert isinstance(shape.config, ModelConfig), "a user-defined model unstacks all of its layers"
    return models.unstack_layer(params, shape.config, name, place, execution=shape.execution)
