"""The decoder's layers: stacked along a first dimension, as they are trained, or apart, as tokens are decoded."""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrlhf.batch import Array, Params
from jaxrlhf.config import Refusal
from jaxrlhf.models.attention.attention import XLA, Attention
from jaxrlhf.models.causal_lm import replaceable
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.layer import decode_layout
from jaxrlhf.models.parameters import STACKS
from jaxrlhf.models.pipeline import Pipeline

Layers = Params | list[Params]
"""A stack of layers, or a list of them."""


def stacks(params: Params, config: ModelConfig, pipeline: Pipeline | None) -> list[Params]:
    """Layers of one kind after another, beside which of them have a window where they differ in it."""
    if config.dense_layers:
        if pipeline is not None:
            raise Refusal(
                f"the first {config.dense_layers} of {config.num_layers} layers have no experts, so that layers cannot "
                f"be divided evenly over {pipeline.stages} stages; use one stage, and tensor or fsdp instead"
            )
        return [params["dense_layers"], params["layers"]]
    if config.sliding_window is None or not config.sliding_layers:
        return [params["layers"]]
    return [{**params["layers"], "slides": jnp.array(config.sliding_layers)[:, None]}]


def kinds(layers: list[Params], config: ModelConfig) -> list[list[Params]]:
    """Layers that lie apart, as `stacks` divides them."""
    dense = config.dense_layers
    return [layers[:dense], layers[dense:]] if dense else [layers]


def count_layers(layers: Layers) -> int:
    """How many there are (with stages: of a stage)."""
    return len(layers) if isinstance(layers, list) else len(jax.tree.leaves(layers)[0])


def run_layers(
    step: Callable[[Array, tuple[Params, Any]], tuple[Array, Any]], hidden: Array, layers: Layers, more_L: Any = None
) -> tuple[Array, Any]:
    """`jax.lax.scan` of `step` over `(layers, more_L)`; where layers lie apart, one after another."""
    if not isinstance(layers, list):
        return jax.lax.scan(step, hidden, (layers, more_L))
    extras = []
    for index, layer in enumerate(layers):
        hidden, extra = step(hidden, (layer, jax.tree.map(lambda leaf: leaf[index], more_L)))  # noqa: B023
        extras.append(extra)
    return hidden, jax.tree.map(lambda *leaves: jnp.stack(leaves), *extras)


@replaceable
def unstack_layers(
    params: Params, config: ModelConfig, *, attention: Attention = XLA, pipeline: Pipeline | None = None
) -> list[Params]:
    """The stacked layers as a list, one tree per layer (with stages: per layer of a stage).

    Slices of the stack inside a decode loop are copied at every token; separate arrays are not.
    The projections to queries, keys and values become one, `qkv`: a few tokens fill no product.

    Args:
      params: Or one of its `layer_parts`, of whose result `joined_parts` makes layers.
    """

    def apart(layers: Params, count: int, routed: bool) -> list[Params]:
        def unstack(layers: Params) -> list[Params]:
            each = [jax.tree.map(lambda leaf: leaf[index], layers) for index in range(count)]  # noqa: B023
            return [decode_layout(layer, routed=routed, attention=attention) for layer in each]

        if pipeline is None:
            return unstack(layers)
        stage = PartitionSpec(pipeline.axes)
        return pipeline.on_stages(unstack, stage, stage)(layers)

    dense, stages = config.dense_layers, 1 if pipeline is None else pipeline.stages
    last = (config.num_layers - dense) // stages, config.experts is not None
    each = [(dense, False), last] if dense else [last]
    return [
        layer
        for layers, kind in zip(stacks(params, config, pipeline), each, strict=True)
        for layer in apart(layers, *kind)
    ]


def layer_parts(params: Params) -> Iterator[Params]:
    """The stacks of layers in parts that can be taken apart one after another, so that little exists twice."""
    trees = {name: params[name] for name in STACKS if name in params}

    def part(select: Callable[[Params], Params]) -> Params:
        return {stack: select(tree) for stack, tree in trees.items()}

    yield part(lambda tree: {"attention": tree["attention"]})
    for path in sorted({path for tree in trees.values() for path in _paths(tree["mlp"])}):
        yield part(lambda tree: {"mlp": _only(tree["mlp"], path)})  # noqa: B023
    yield part(lambda tree: {name: leaf for name, leaf in tree.items() if name not in ("attention", "mlp")})


def joined_parts(parts: Sequence[list[Params]]) -> list[Params]:
    """Layers out of what `unstack_layers` made of each part."""
    return [reduce(_joined, pieces) for pieces in zip(*parts, strict=True)]


def _paths(tree: Params) -> list[tuple[str, ...]]:
    """Of all that is no dictionary."""
    inner = {name: _paths(leaf) if isinstance(leaf, dict) else [()] for name, leaf in tree.items()}
    return [(name, *path) for name, paths in inner.items() for path in paths]


def _only(tree: Params, path: tuple[str, ...]) -> Params:
    """The tree without all that is elsewhere."""
    name, *rest = path
    if name not in tree:
        return {}
    return {name: _only(tree[name], tuple(rest)) if rest else tree[name]}


def _joined(one: Params, other: Params) -> Params:
    both = {name: _joined(one[name], other[name]) for name in one.keys() & other.keys() if isinstance(one[name], dict)}
    return {**one, **other, **both}
