"""The weights of an engine: layers in their stack, as they are trained, and apart, as tokens are decoded."""

from typing import Any

import jax

from jaxrlhf import models
from jaxrlhf.batch import Params
from jaxrlhf.engine import programs
from jaxrlhf.engine.compiled import Compiled
from jaxrlhf.models import AnyModel
from jaxrlhf.models.config import STACKS, ModelConfig


def spent_layers(config: AnyModel, spent: Any) -> Any:
    """`spent`, as `Engine.load` takes it, if that has something of layers that lie in stacks; else None."""
    if spent is None or not isinstance(config, ModelConfig):
        return None
    return spent if any(jax.tree.leaves([spent[name] for name in STACKS if name in spent])) else None


class Weights:
    """One version of the weights.

    Args:
      spent: From `spent_layers`; None keeps the stack.

    Attributes:
      params: All weights; without layers where they only lie apart.
      stackless: Layers that only lie apart; None where they have their stack.
    """

    def __init__(self, compiled: Compiled, params: Params, version: int, *, spent: Any = None) -> None:
        self._compiled, self.params, self.version = compiled, params, version
        self.stackless: list[Params] | None = None
        self._layers: list[Params] | None = None
        if spent is not None:
            self.stackless = self._taken_apart(spent)
            self.params = {name: tree for name, tree in params.items() if name not in STACKS}

    def layers(self) -> list[Params]:
        """The layers as `decode` reads them."""
        if self.stackless is not None:
            return self.stackless
        if self._layers is None:
            self._layers = self._unstacked(self.params, "all")
        return self._layers

    def drop_copies(self) -> None:
        """Let go of layers that lie apart beside their stack."""
        self._layers = None

    def _taken_apart(self, spent: Any) -> list[Params]:
        """The layers, whose spent leaves are deleted: part after part, so that only a part exists twice."""
        made = []
        parts = zip(models.layer_parts(self.params), models.layer_parts(spent), strict=True)
        for number, (part, gone) in enumerate(parts):
            made.append(self._unstacked(part, number))
            if self._compiled.here:
                jax.block_until_ready(made[-1])  # before its source goes, and before the next takes room
                jax.tree.map(lambda leaf, is_spent: leaf.delete() if is_spent else None, part, gone)
        return models.joined_parts(made)

    def _unstacked(self, params: Params, part: int | str) -> list[Params]:
        return self._compiled.run(("unstack", part), programs.unstack, params, out=None)
