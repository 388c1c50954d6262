"""Layers in the two layouts: stacked on a first dimension for training, a list of layers for decoding.

A scan over the stack compiles one layer. A decode loop would copy slices of a stack at every token, so
its layers are separate arrays, in the decode layout: queries, keys and values in one product.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec

from jaxrlhf.batch import Array, Params
from jaxrlhf.config import Refusal
from jaxrlhf.models import linear
from jaxrlhf.models.causal_lm import causal_lm_method
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.execution import ONE_DEVICE, Execution
from jaxrlhf.models.layer import repeat_heads
from jaxrlhf.models.parameters import STACKS
from jaxrlhf.models.pipeline import Pipeline

LAYER_FLAGS = ("slides", "turns")
"""Flags beside the parameters of layers: a layer has the window, a layer rotates its heads."""

Layers = Params | list[Params]
"""A stack of layers, or a list of them."""


def stacks(params: Params, config: ModelConfig, pipeline: Pipeline | None) -> list[Params]:
    """The stacks of layers in their order, with `LAYER_FLAGS` where layers differ in them."""
    flags = {}
    if config.sliding_window is not None and config.sliding_layers:
        flags["slides"] = jnp.array(config.sliding_layers)[:, None]
    if config.rope_layers:
        flags["turns"] = jnp.array(config.rope_layers)[:, None]
    dense = config.dense_layers
    if dense:
        if pipeline is not None:
            raise Refusal(
                f"the first {config.dense_layers} of {config.num_layers} layers have no experts, so that layers cannot "
                f"be divided evenly over {pipeline.stages} stages; use one stage, and tensor or fsdp instead"
            )
        first, last = (
            {name: flag[part] for name, flag in flags.items()} for part in (slice(dense), slice(dense, None))
        )
        return [{**params["dense_layers"], **first}, {**params["layers"], **last}]
    return [{**params["layers"], **flags}]


def split_by_stack(layers: list[Params], config: ModelConfig) -> list[list[Params]]:
    """A list of layers, divided as `stacks` divides them."""
    dense = config.dense_layers
    return [layers[:dense], layers[dense:]] if dense else [layers]


def count_layers(layers: Layers) -> int:
    """Number of layers; inside of a pipeline, of a stage's."""
    return len(layers) if isinstance(layers, list) else len(jax.tree.leaves(layers)[0])


def run_layers(
    step: Callable[[Array, tuple[Params, Any]], tuple[Array, Any]], hidden: Array, layers: Layers, extra_L: Any = None
) -> tuple[Array, Any]:
    """`jax.lax.scan` of `step` over `(layers, extra_L)`, or a Python loop over a list of layers."""
    if not isinstance(layers, list):
        return jax.lax.scan(step, hidden, (layers, extra_L))
    outputs = []
    for index, layer in enumerate(layers):
        hidden, output = step(hidden, (layer, jax.tree.map(lambda leaf: leaf[index], extra_L)))  # noqa: B023
        outputs.append(output)
    return hidden, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)


@causal_lm_method
def unstack_layers(params: Params, config: ModelConfig, *, execution: Execution = ONE_DEVICE) -> list[Params]:
    """A tree for each layer (with stages: for each layer of a stage), in the decode layout.

    Args:
      params: Parameters, or one of their `layer_parts`, of whose results `joined_parts` makes layers.
    """

    def unstack(layers: Params, count: int) -> list[Params]:
        trees = [jax.tree.map(lambda leaf: leaf[index], layers) for index in range(count)]  # noqa: B023
        return [decode_layout(tree, execution) for tree in trees]

    counts = [config.dense_layers, config.num_layers - config.dense_layers][-2 if config.dense_layers else -1 :]
    found, pipeline = stacks(params, config, execution.pipeline), execution.pipeline
    if pipeline is None:
        return [layer for layers, count in zip(found, counts, strict=True) for layer in unstack(layers, count)]
    stage = PartitionSpec(pipeline.axes)
    return pipeline.on_stages(lambda layers: unstack(layers, counts[0] // pipeline.stages), stage, stage)(found[0])


def layer_parts(params: Params) -> Iterator[Params]:
    """The stacks in parts that can be unstacked one after another, so that little exists twice: attention, each
    matrix of the MLP, and the rest."""
    flat = flatten_dict({name: params[name] for name in STACKS if name in params})
    parts: dict[Any, Params] = {}
    for path in sorted(flat):
        part = {"attention": "attention", "mlp": path[1:]}.get(path[1])
        parts.setdefault(part, {})[path] = flat[path]
    none: Params = {name: {} for name in STACKS if name in params}
    return ({**none, **unflatten_dict(part)} for part in parts.values())


def joined_parts(parts: Sequence[list[Params]]) -> list[Params]:
    """Layers out of the results of `unstack_layers` for each part."""
    return [
        unflatten_dict({path: leaf for piece in pieces for path, leaf in flatten_dict(piece).items()})
        for pieces in zip(*parts, strict=True)
    ]


_HEADS = {"qkv": 1, "query": 1, "query_down": 1, "latent": 1, "output": 2}
_MLP = {"gate": 1, "up": 1, "down": 1}
"""Input dimensions of the matrices that a decode loop multiplies few tokens with."""


def decode_layout(layer: Params, execution: Execution) -> Params:
    """A layer, or a part of it, as a decode loop reads it fastest."""
    ready = dict(layer)
    if "attention" in layer:
        ready["attention"] = _few_rows_layouts(_join_projections(layer["attention"], execution.kv_copies), _HEADS)
    if "mlp" in layer:
        ready["mlp"] = _few_rows_layouts(layer["mlp"], _MLP)
        if "shared" in layer["mlp"]:
            ready["mlp"]["shared"] = _few_rows_layouts(layer["mlp"]["shared"], _MLP)
    return ready


def _few_rows_layouts(weights: Params, input_dims: dict[str, int]) -> Params:
    named = {name: dims for name, dims in input_dims.items() if name in weights}
    return weights | {name: linear.few_rows_layout(weights[name], dims=dims) for name, dims in named.items()}


def _join_projections(attention: Params, kv_copies: int) -> Params:
    """Queries, keys and values side by side for each copy of a key-value head, so that they stay where it is."""
    if "key_value" in attention:
        return attention

    def join(parts: list[Array]) -> Array:
        parts = [parts[0], *(repeat_heads(part, kv_copies) for part in parts[1:])]
        *before, kv_heads, head_dim = parts[1].shape
        return jnp.concatenate([part.reshape(*before, kv_heads, -1, head_dim) for part in parts], axis=-2)

    names = ("query", "key", "value")
    biases = [attention[f"{name}_bias"] for name in names if f"{name}_bias" in attention]
    rest = {name: leaf for name, leaf in attention.items() if name.removesuffix("_bias") not in names}
    if rest.get("key_norm", jnp.zeros(0)).ndim > 1:  # one norm over all heads
        rest["key_norm"] = repeat_heads(rest["key_norm"], kv_copies)
    weight = linear.side_by_side([attention[name] for name in names], join)
    return rest | {"qkv": weight} | ({"qkv_bias": join(biases)} if biases else {})
