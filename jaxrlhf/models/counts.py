"""Numbers of weights of a model, counted from the declaration of its parameters."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax

from jaxrlhf.models.causal_lm import AnyModel
from jaxrlhf.models.config import DENSE_LAYERS, STACKS, Head
from jaxrlhf.models.config.param import Param
from jaxrlhf.models.parameters import declare, path_name


@dataclass(frozen=True)
class WeightCounts:
    """Numbers of weights, without padding. All counts except `total` and `head` are sums over the decoder's layers.

    Attributes:
      total: All weights, with the embedding, the head and a vision tower.
      head: Weights of the head; a tied head counts the embedding.
      layers: Weights of layers, without norms of the residual stream.
      attention: Weights of attention.
      mlp: Weights of the MLP, with router and experts, without the first dense layers of a model with experts.
      experts: Weights of the routed experts.
      experts_per_layer: Number of routed experts of a layer; 0 for a dense model.
      down: Weights of the second matrix of dense MLPs.
      outputs: Weights of matrices that write to the residual stream, without routed experts.
      by_kv_heads: Weights of key-value heads: pairs of a layer's number of these heads, and their weights.
    """

    total: int
    head: int
    layers: int
    attention: int
    mlp: int
    experts: int
    experts_per_layer: int
    down: int
    outputs: int
    by_kv_heads: tuple[tuple[int, int], ...]

    def layers_with(self, experts: float | None) -> float:
        """Return the weights of layers with only some of the routed experts of each layer; None counts all."""
        return self.layers if experts is None else self.layers - self.experts * (1 - experts / self.experts_per_layer)

    def replicated(self, tensor: int, *fewer: int) -> float:
        """Return the number of weights that the devices of a model copy hold beyond one copy: of key-value heads.

        Args:
          tensor: Number of ways that every layer is split.
          fewer: Numbers of ways to try if key-value heads do not split `tensor` ways; if none fits, they are whole.
        """
        return sum(weights * (tensor / first_divisor(heads, tensor, *fewer) - 1) for heads, weights in self.by_kv_heads)


def first_divisor(count: int, *ways: int) -> int:
    """Return the first number of ways that divides a count, as in `sharding.rules`; 1 if there is none."""
    return next((each for each in ways if count % each == 0), 1)


@cache
def weight_counts(model: AnyModel, head: Head = "lm") -> WeightCounts:
    """Count the weights of a model with the given head."""
    declared = declare(model, head)
    sizes = {path_name(path): math.prod(param.unpadded) for path, param in jax.tree.leaves_with_path(declared)}
    layers = dict(_parameters_of_layers(declared))
    by_kv_heads: Counter[int] = Counter()
    for name, param in layers.items():
        for dim in param.dims:
            if isinstance(dim, tuple) and dim[0] == "kv_heads":
                by_kv_heads[dim[1]] += sizes[name]

    def total(pattern: str) -> int:
        return sum(sizes[name] for name in layers if re.search(pattern, name))

    return WeightCounts(
        total=sum(sizes.values()),
        head=sizes["head"] if "head" in sizes else sizes.get("embed", 0),
        layers=total(""),
        attention=total(r"\.attention\."),
        mlp=total(rf"^(?!{DENSE_LAYERS}).*\.mlp\."),
        experts=total(r"\.experts\."),
        experts_per_layer=max((param.shape[1] for param in layers.values() if "experts" in param.dims), default=0),
        down=total(r"\.mlp\.down$"),
        outputs=total(r"\.attention\.output$|\.mlp\.(shared\.)?down$"),
        by_kv_heads=tuple(by_kv_heads.items()),
    )


def _parameters_of_layers(declared: dict[str, Any]) -> Iterator[tuple[str, Param]]:
    """Yield path and declaration of the parameters of layers, without norms of the residual stream."""
    for path, param in jax.tree.leaves_with_path({name: declared[name] for name in STACKS if name in declared}):
        name = path_name(path)
        if ".attention." in name or ".mlp." in name or len(param.shape) > 2:
            yield name, param
