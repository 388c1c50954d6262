"""Layers in the two layouts: stacked on a first dimension for training, a list of layers for decoding.

A scan over the stack compiles one layer. A decode loop would copy slices of a stack at every token, so
its layers are separate arrays, in the decode layout: queries, keys and values in one product.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec

from jaxrlhf.batch import Array, Params
from jaxrlhf.config import Refusal
from jaxrlhf.models import linear
from jaxrlhf.models.causal_lm import causal_lm_method
from jaxrlhf.models.config import LINEAR_LAYERS, STACKS, ModelConfig, Run
from jaxrlhf.models.execution import ONE_DEVICE, Execution
from jaxrlhf.models.layer import repeat_heads
from jaxrlhf.models.pipeline import Pipeline

LAYER_FLAGS = ("slides", "turns", "depth")
"""Flags beside the parameters of layers: a layer has the window, a layer rotates its heads, a layer's index."""

Stacks = dict[str, Params]
"""Stacks of layers by their names."""

Layers = Stacks | list[Params]
"""Stacks of layers, or a list of all layers in their order."""

Step = Callable[[Array, tuple[Params, Any]], tuple[Array, dict[str, Any]]]
"""Function of hidden states and of a layer with what is its own, to hidden states and outputs by name."""


def stacks(params: Params, config: ModelConfig, pipeline: Pipeline | None) -> Stacks:
    """The stacks of layers, with `LAYER_FLAGS` where layers differ in them.

    Raises:
      Refusal: Stages cannot divide them.
    """
    repeats, runs = config.pattern
    if pipeline is not None and config.dense_layers:
        raise Refusal(
            f"the first {config.dense_layers} of {config.num_layers} layers have no experts, so that layers cannot "
            f"be divided evenly over {pipeline.stages} stages; use one stage, and tensor or fsdp instead"
        )
    if pipeline is not None and len(runs) > 1 and repeats % pipeline.stages:
        raise Refusal(
            f"{repeats} times {config.num_layers // repeats} layers of several kinds cannot be divided evenly over "
            f"{pipeline.stages} stages; use stages that divide {repeats}, or tensor or fsdp instead"
        )
    flags = {}
    if config.sliding_window is not None and config.sliding_layers:
        flags["slides"] = jnp.array(config.sliding_layers)[:, None]
    if config.rope_layers:
        flags["turns"] = jnp.array(config.rope_layers)[:, None]
    if config.vision is not None and config.vision.deepstack:
        flags["depth"] = jnp.arange(config.num_layers)[:, None]
    by_stack = split_by_stack(flags, config)
    return {name: {**params[name], **by_stack.get(name, {})} for name in STACKS if name in params}


def split_by_stack(leaves_L: Any, config: ModelConfig, *, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """A tree of arrays with an entry for each layer in order, divided as the stacks are.

    Args:
      skip: Stacks whose layers have no entry.
    """
    names = [name for name in config.pattern.stack_of() if name not in skip]
    if len(set(names)) == 1:
        return {names[0]: leaves_L}
    places = {name: np.array([place for place, other in enumerate(names) if other == name]) for name in set(names)}
    return {name: jax.tree.map(lambda leaf: leaf[place], leaves_L) for name, place in places.items()}  # noqa: B023


def cache_places(config: ModelConfig, stages: int) -> dict[str, Array]:
    """Places of the layers of each stack among all that keep the same: keys and values, or states.

    Args:
      stages: Parts that the layers are divided into; places are those in one of them.
    """
    names = config.pattern.stack_of()[: config.num_layers // stages]
    kinds = [name == LINEAR_LAYERS for name in names]
    places = [kinds[:index].count(kind) for index, kind in enumerate(kinds)]
    return {
        name: jnp.array([place for place, other in zip(places, names, strict=True) if other == name])
        for name in set(names)
    }


def run_layers(
    config: ModelConfig, step: Step, hidden: Array, layers: Layers, extras: dict[str, Any] | None = None
) -> tuple[Array, dict[str, Any]]:
    """Run layers in their order: a `jax.lax.scan` over each run of like layers, and over the times that runs repeat.

    Args:
      layers: All layers, or those of one stage. A list is run by a loop in Python.
      extras: What layers get beside their parameters, by stack and with an entry for each of its layers.

    Returns:
      Hidden states, and each output of `step` stacked in the order of the layers that have it.
    """
    extras, (_, runs) = extras or {}, config.pattern
    if isinstance(layers, list):
        return _run_list(config, step, hidden, layers, extras)
    if len(runs) == 1:
        (name,) = layers
        hidden, outputs = jax.lax.scan(step, hidden, (layers[name], extras.get(name)))
        return hidden, outputs
    times = len(jax.tree.leaves(layers[runs[0].stack])[0]) // config.pattern.each(runs[0].stack)
    given = layers, {name: extras.get(name) for name in layers}
    if times == 1:
        return _run_once(runs, step, hidden, given)
    given = jax.tree.map(lambda leaf: leaf.reshape(times, -1, *leaf.shape[1:]), given)
    hidden, outputs = jax.lax.scan(lambda hidden, given: _run_once(runs, step, hidden, given), hidden, given)
    return hidden, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outputs)


def _run_once(runs: tuple[Run, ...], step: Step, hidden: Array, given: Any) -> tuple[Array, dict[str, Any]]:
    """All runs, one after another."""
    outputs: dict[str, list[Any]] = {}
    begun = dict.fromkeys(given[0], 0)
    for run in runs:
        part = slice(begun[run.stack], begun[run.stack] + run.layers)
        of_run = jax.tree.map(lambda leaf: leaf[part], (given[0][run.stack], given[1][run.stack]))  # noqa: B023
        hidden, output = jax.lax.scan(step, hidden, of_run)
        begun[run.stack] = part.stop
        for name, leaves in output.items():
            if leaves is not None:
                outputs.setdefault(name, []).append(leaves)
    return hidden, {
        name: jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts) for name, parts in outputs.items()
    }


def _run_list(
    config: ModelConfig, step: Step, hidden: Array, layers: list[Params], extras: dict[str, Any]
) -> tuple[Array, dict[str, Any]]:
    """A list of layers, one after another."""
    outputs: dict[str, list[Any]] = {}
    begun = dict.fromkeys(STACKS, 0)
    for layer, name in zip(layers, config.pattern.stack_of(), strict=False):
        extra = jax.tree.map(lambda leaf: leaf[begun[name]], extras.get(name))  # noqa: B023
        hidden, output = step(hidden, (layer, extra))
        begun[name] += 1
        for key, leaf in output.items():
            if leaf is not None:
                outputs.setdefault(key, []).append(leaf)
    return hidden, {key: jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts) for key, parts in outputs.items()}


@causal_lm_method
def unstack_layers(params: Params, config: ModelConfig, *, execution: Execution = ONE_DEVICE) -> list[Params]:
    """A tree for each layer (with stages: for each layer of a stage), in the decode layout.

    Args:
      params: Parameters, or one of their `layer_parts`, of whose results `joined_parts` makes layers.
    """
    pipeline = execution.pipeline
    names = config.pattern.stack_of()[: config.num_layers // execution.stages]

    def unstack(layers: Stacks) -> list[Params]:
        begun, trees = dict.fromkeys(STACKS, 0), []
        for name in names:
            tree = jax.tree.map(lambda leaf: leaf[begun[name]], layers[name])  # noqa: B023
            trees.append(decode_layout(tree, execution))
            begun[name] += 1
        return trees

    found = stacks(params, config, pipeline)
    if pipeline is None:
        return unstack(found)
    stage = PartitionSpec(pipeline.axes)
    return pipeline.on_stages(unstack, stage, stage)(found)


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
_HEADS |= {f"linear_{name}": 1 for name in ("query", "key", "value", "gate")}
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
    if "key_value" in attention or "linear_query" in attention:
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
