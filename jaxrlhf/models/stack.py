"""Layers in two layouts: stacked on a first dimension for training, and a list of layers for decoding.

A scan over the stack compiles one layer. A decode loop would copy slices of a stack at every token. Its layers are
therefore separate arrays in the decode layout, with queries, keys and values in one product.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxrlhf.batch import Array, Params
from jaxrlhf.config import Refusal
from jaxrlhf.models import linear
from jaxrlhf.models.attention.attention_xla import ATTENDED
from jaxrlhf.models.attention.kv_cache import Prefix
from jaxrlhf.models.causal_lm import causal_lm_method
from jaxrlhf.models.config import LAYERS, LENDERS, LINEAR_LAYERS, SLIDING_LAYERS, STACKS, ModelConfig, Pattern, Run
from jaxrlhf.models.execution import ONE_DEVICE, Execution
from jaxrlhf.models.layer import repeat_heads
from jaxrlhf.models.pipeline import Pipeline

LAYER_FLAGS = ("slides", "turns", "depth", "cut")
"""Per-layer flags next to the parameters: the layer has the window, the layer rotates its heads, the layer's index, and
the cut of its gates (see `mlp.gated`)."""

Stacks = dict[str, Params]
"""Stacks of layers by name."""

Layers = Stacks | list[Params]
"""Stacks of layers, or a list of all layers in order."""

Lent = dict[str, Prefix]
"""Keys and values of the most recent layer of each stack that later layers borrow from; empty if no layer borrows."""


class Flow(NamedTuple):
    """Arrays passed from layer to layer: hidden states, and keys and values that later layers borrow."""

    hidden: Array
    lent: Lent

    def passed(self, stack: str, hidden: Array, kept: Any) -> "Flow":
        """Return the flow after a layer. The layer lends its keys and values if later layers borrow from its stack."""
        return Flow(hidden, {name: kept if name == stack else lent for name, lent in self.lent.items()})


def nothing_lent(config: ModelConfig, hidden_RWD: Array, execution: Execution) -> Lent:
    """Return zeros in place of the keys and values that layers borrow."""
    if not config.borrowing_layers:
        return {}
    (rows, width, _), zeros = hidden_RWD.shape, {}
    for stack in {LENDERS[name] for name in config.sections[1].stack_of()}:
        layer = config.of_stack(stack)
        heads = layer.num_kv_heads * execution.kv_copies(layer.num_kv_heads)
        zeros_RWKH = jnp.zeros((rows, width, heads, layer.head_dim), hidden_RWD.dtype)
        zeros[stack] = Prefix(zeros_RWKH, zeros_RWKH)
    return zeros


Step = Callable[[str, Flow, tuple[Params, Any]], tuple[Flow, dict[str, Any]]]
"""Function `(stack, flow, (layer, extras)) -> (flow, outputs)` that runs one layer: the name of its stack, the arrays
before it, its parameters with its extra inputs; then the arrays after it, and outputs by name."""


_LAYER_INPUT = "layer_input"
"""Checkpoint name of the residual stream before a layer."""


def rematerialised(step: Step, execution: Execution) -> Step:
    """Wrap the step so that the backward pass recomputes it, if the execution has `remat`.

    The layer's input is kept, and the outputs of attention that loops over tiles or sequences: on the device or in host
    memory.
    """
    if not execution.remat:
        return step
    policies = jax.checkpoint_policies
    kept = policies.save_only_these_names(ATTENDED)
    if execution.offloads:
        kept = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[_LAYER_INPUT, ATTENDED],
            offload_src="device",
            offload_dst="pinned_host",
        )

    def again(name: str, flow: Flow, each: tuple[Params, Any]) -> tuple[Flow, dict[str, Any]]:
        return step(name, flow._replace(hidden=checkpoint_name(flow.hidden, _LAYER_INPUT)), each)

    # Inside a scan the compiler cannot merge work across layers, so the barrier against merging is not needed.
    return jax.checkpoint(again, prevent_cse=False, policy=kept, static_argnums=(0,))


def stacks(params: Params, config: ModelConfig, pipeline: Pipeline | None) -> Stacks:
    """Return the stacks of layers, with `LAYER_FLAGS` if layers differ in them.

    Raises:
      Refusal: Pipeline stages cannot divide the layers.
    """
    repeats, runs = config.pattern
    if pipeline is not None and config.dense_layers:
        raise Refusal(
            f"the first {config.dense_layers} of {config.num_layers} layers have no experts, so layers do not split "
            f"evenly over {pipeline.stages} stages; set stage=1 and use tensor or fsdp instead"
        )
    if pipeline is not None and (config.borrowing_layers or config.layer_inputs is not None):
        raise Refusal(
            "layers that borrow keys and values, or have their own layer inputs, do not split over "
            f"{pipeline.stages} stages; set stage=1 and use tensor or fsdp instead"
        )
    if pipeline is not None and len(runs) > 1 and repeats % pipeline.stages:
        raise Refusal(
            f"{repeats} repetitions of {config.num_layers // repeats} layers of several kinds do not split evenly "
            f"over {pipeline.stages} stages; set stage to a divisor of {repeats}, or use tensor or fsdp instead"
        )
    flags = {}
    if config.sliding_window is not None and config.sliding_layers and config.full_heads is None:
        flags["slides"] = jnp.array(config.sliding_layers)[:, None]
    if config.rope_layers:
        flags["turns"] = jnp.array(config.rope_layers)[:, None]
    if any(config.sparsity):
        flags["cut"] = jnp.array([NormalDist().inv_cdf(part) if part else -np.inf for part in config.sparsity])[:, None]
    if config.vision is not None and config.vision.deepstack:
        flags["depth"] = jnp.arange(config.num_layers)[:, None]
    by_stack = split_by_stack(flags, config)
    return {name: {**params[name], **by_stack.get(name, {})} for name in STACKS if name in params}


def split_by_stack(leaves_L: Any, config: ModelConfig, *, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """Divide a tree of arrays with one entry per layer, in layer order, into the stacks.

    Args:
      skip: Names of stacks whose layers have no entry.
    """
    names = [name for name in config.pattern.stack_of() if name not in skip]
    if len(set(names)) == 1:
        return {names[0]: leaves_L}
    places = {name: np.array([place for place, other in enumerate(names) if other == name]) for name in set(names)}
    return {name: jax.tree.map(lambda leaf: leaf[place], leaves_L) for name, place in places.items()}  # noqa: B023


def cache_places(config: ModelConfig, stages: int) -> dict[str, Array]:
    """Return the indices of each stack's layers among all layers that keep the same kind of cache.

    The kinds are keys and values, keys and values of a separate stack with a window, and states. A layer that borrows
    has the index of the layer that it borrows from.

    Args:
      stages: Number of parts that the layers are divided into; indices are within one part.
    """
    names = config.pattern.stack_of()[: config.num_layers // stages]
    kinds = [name if name in (LINEAR_LAYERS, SLIDING_LAYERS) or name in LENDERS else LAYERS for name in names]
    places = [kinds.count(LENDERS[kind]) - 1 if kind in LENDERS else place for kind, place in _places(kinds)]
    return {
        name: jnp.array([place for place, other in zip(places, names, strict=True) if other == name])
        for name in set(names)
    }


def run_layers(
    config: ModelConfig, step: Step, flow: Flow, layers: Layers, extras: dict[str, Any] | None = None
) -> tuple[Flow, dict[str, Any]]:
    """Run layers in order: a `jax.lax.scan` over each run of like layers, and one over the repetitions of the runs.

    Args:
      layers: All layers, or the layers of one stage. A list is run by a Python loop.
      extras: Inputs of layers besides their parameters, by stack, with an entry for each layer of the stack.

    Returns:
      The flow after the last layer, and each output of `step`, stacked in the order of the layers that have it.
    """
    extras, found = extras or {}, []
    if isinstance(layers, list):
        return _run_list(config, step, flow, layers, extras)
    for section in config.sections:
        given = {run.stack: (layers[run.stack], extras.get(run.stack)) for run in section.runs}
        run = _borrowed if section.runs[0].stack in LENDERS else _run_section
        flow, outputs = run(section, step, flow, given)
        found.append(outputs)
    return flow, _joined(found, jnp.concatenate)


def _borrowed(section: Pattern, step: Step, flow: Flow, given: dict[str, Any]) -> tuple[Flow, dict[str, Any]]:
    """Run a section of layers that borrow. Lent arrays stay unchanged and are not carried through the scans."""

    def one(stack: str, hidden: Flow, each: Any) -> tuple[Flow, dict[str, Any]]:
        passed, outputs = step(stack, hidden._replace(lent=flow.lent), each)
        return passed._replace(lent={}), outputs

    passed, outputs = _run_section(section, one, flow._replace(lent={}), given)
    return passed._replace(lent=flow.lent), outputs


def _run_section(section: Pattern, step: Step, flow: Flow, given: dict[str, Any]) -> tuple[Flow, dict[str, Any]]:
    """Run all repetitions of a pattern."""
    runs = section.runs
    if len(runs) == 1:
        return jax.lax.scan(partial(step, runs[0].stack), flow, given[runs[0].stack])
    times = len(jax.tree.leaves(given[runs[0].stack])[0]) // section.each(runs[0].stack)
    if times == 1:
        return _run_once(runs, step, flow, given)
    given = jax.tree.map(lambda leaf: leaf.reshape(times, -1, *leaf.shape[1:]), given)
    flow, outputs = jax.lax.scan(lambda flow, given: _run_once(runs, step, flow, given), flow, given)
    return flow, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outputs)


def _run_once(runs: tuple[Run, ...], step: Step, flow: Flow, given: dict[str, Any]) -> tuple[Flow, dict[str, Any]]:
    """Run one repetition of a pattern: all its runs, one after another."""
    found, used = [], dict.fromkeys(given, 0)
    for run in runs:
        part = slice(used[run.stack], used[run.stack] + run.layers)
        of_run = jax.tree.map(lambda leaf: leaf[part], given[run.stack])  # noqa: B023
        flow, outputs = jax.lax.scan(partial(step, run.stack), flow, of_run)
        used[run.stack] = part.stop
        found.append(outputs)
    return flow, _joined(found, jnp.concatenate)


def _run_list(
    config: ModelConfig, step: Step, flow: Flow, layers: list[Params], extras: dict[str, Any]
) -> tuple[Flow, dict[str, Any]]:
    """Run a list of layers, one after another."""
    found = []
    for layer, (name, place) in zip(layers, _places(config.pattern.stack_of()), strict=False):
        flow, outputs = step(name, flow, (layer, _entry(extras.get(name), place)))
        found.append(outputs)
    return flow, _joined(found, jnp.stack)


def _joined(found: list[dict[str, Any]], join: Callable[[list[Array]], Array]) -> dict[str, Any]:
    """Join the outputs of several runs or layers by name, in order; runs or layers without an output are skipped."""
    outputs: dict[str, list[Any]] = {}
    for each in found:
        for name, leaves in each.items():
            if leaves is not None:
                outputs.setdefault(name, []).append(leaves)
    return {name: jax.tree.map(lambda *leaves: join([*leaves]), *parts) for name, parts in outputs.items()}


@causal_lm_method
def unstack_layers(params: Params, config: ModelConfig, *, execution: Execution = ONE_DEVICE) -> list[Params]:
    """Return a tree for each layer (with pipeline stages: for each layer of a stage), in the decode layout.

    Args:
      params: Parameters, or one of their `layer_parts`; `joined_parts` joins the results of all parts.
    """
    places = layer_places(config, execution.stages)
    return [unstack_layer(params, config, name, place, execution=execution) for name, place in places]


def unstack_layer(
    params: Params, config: ModelConfig, name: str, place: Array | int, *, execution: Execution = ONE_DEVICE
) -> Params:
    """Return one of the layers that `unstack_layers` returns.

    Args:
      name: Stack of the layer.
      place: Index of the layer in the stack (with pipeline stages: in a stage's part of the stack).
    """
    pipeline = execution.pipeline
    layers = stacks(params, config, pipeline)[name]

    def unstack(layers: Params, place: Array) -> Params:
        layer = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, place, keepdims=False), layers)
        return decode_layout(layer, execution)

    if pipeline is not None:
        stage = PartitionSpec(pipeline.axes)
        unstack = pipeline.on_stages(unstack, (stage, PartitionSpec()), stage)
    return unstack(layers, jnp.asarray(place))


def layer_places(config: ModelConfig, stages: int) -> list[tuple[str, int]]:
    """Return the stack of each layer (of each layer of a stage), and the layer's index in the stack."""
    return _places(config.pattern.stack_of()[: config.num_layers // stages])


def _places(names: Sequence[str]) -> list[tuple[str, int]]:
    """Return the stack of each layer, and the layer's index in the stack."""
    return [(name, names[:index].count(name)) for index, name in enumerate(names)]


def _entry(leaves: Any, place: int) -> Any:
    """Return the arrays of one layer from the arrays of its stack."""
    return jax.tree.map(lambda leaf: leaf[place], leaves)


def layer_parts(params: Params) -> Iterator[Params]:
    """Return the stacks in parts: attention, each matrix of the MLP, and the rest.

    The parts can be unstacked one after another, so that only little memory exists twice.
    """
    flat = flatten_dict({name: params[name] for name in STACKS if name in params})
    parts: dict[Any, Params] = {}
    for path in sorted(flat):
        part = {"attention": "attention", "mlp": path[1:]}.get(path[1])
        parts.setdefault(part, {})[path] = flat[path]
    none: Params = {name: {} for name in STACKS if name in params}
    return ({**none, **unflatten_dict(part)} for part in parts.values())


def joined_parts(parts: Sequence[list[Params]]) -> list[Params]:
    """Join the results of `unstack_layers` for each part into layers."""
    return [
        unflatten_dict({path: leaf for piece in pieces for path, leaf in flatten_dict(piece).items()})
        for pieces in zip(*parts, strict=True)
    ]


_HEADS = {"qkv": 1, "query": 1, "key": 1, "query_down": 1, "latent": 1, "output": 2}
_HEADS |= {f"linear_{name}": 1 for name in ("query", "key", "value", "gate")}
_MLP = {"gate": 1, "up": 1, "down": 1}
"""Number of input dimensions of each matrix that a decode loop multiplies with few tokens."""


def decode_layout(layer: Params, execution: Execution) -> Params:
    """Convert a layer, or a part of it, to the layout that a decode loop reads fastest."""
    ready = dict(layer)
    if "attention" in layer:
        ready["attention"] = _few_rows_layouts(_join_projections(layer["attention"], execution), _HEADS)
    if "mlp" in layer:
        ready["mlp"] = _few_rows_layouts(layer["mlp"], _MLP)
        if "shared" in layer["mlp"]:
            ready["mlp"]["shared"] = _few_rows_layouts(layer["mlp"]["shared"], _MLP)
    return ready


def _few_rows_layouts(weights: Params, input_dims: dict[str, int]) -> Params:
    named = {name: dims for name, dims in input_dims.items() if name in weights}
    return weights | {name: linear.few_rows_layout(weights[name], dims=dims) for name, dims in named.items()}


def _join_projections(attention: Params, execution: Execution) -> Params:
    """Join queries, keys and values for each copy of a key-value head, so that they stay on the head's device."""
    if "value" not in attention:  # latents, states, and layers that have no values of their own
        return attention

    def repeated(part: Array) -> Array:
        return repeat_heads(part, execution.kv_copies(part.shape[-2]))

    def join(parts: list[Array]) -> Array:
        parts = [parts[0], *map(repeated, parts[1:])]
        *before, kv_heads, head_dim = parts[1].shape
        return jnp.concatenate([part.reshape(*before, kv_heads, -1, head_dim) for part in parts], axis=-2)

    names = ("query", "key", "value")
    biases = [attention[f"{name}_bias"] for name in names if f"{name}_bias" in attention]
    rest = {name: leaf for name, leaf in attention.items() if name.removesuffix("_bias") not in names}
    if rest.get("key_norm", jnp.zeros(0)).ndim > 1:  # one norm over all heads
        rest["key_norm"] = repeated(rest["key_norm"])
    weight = linear.side_by_side([attention[name] for name in names], join)
    return rest | {"qkv": weight} | ({"qkv_bias": join(biases)} if biases else {})
