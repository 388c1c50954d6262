"""Low-rank adapters: their declaration, and parameter trees with and without adapters.

Adapters are a separate tree: an `Adapter` at the path of each adapted weight, and the head if the head is trained.
`adapted` merges that tree into the tree of parameters.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.config import Lora, Refusal
from jaxrlhf.models.causal_lm import AnyModel, CausalLM
from jaxrlhf.models.config import LAYERS, LENDERS, LINEAR_LAYERS, STACKS, Head, ModelConfig
from jaxrlhf.models.linear import Adapted, Adapter
from jaxrlhf.models.lora.quantized import Format, Quantized, quantize
from jaxrlhf.models.parameters import VISION, Param, declare, path_name

ROOMS = ("attention", "mlp")
"""Subtrees of a layer that hold its matrices."""

INPUTS = {"output": 2}
"""Number of input dimensions, for matrices with more than one input dimension."""


def declare_adapters(config: AnyModel, head: Head, lora: Lora) -> dict[str, Any]:
    """Declare the tree of `Param` that is trained instead of the parameters: adapters, and a value or score head.

    Raises:
      Refusal: A target matrix is missing in some layers or exists once per expert, the model is the user's own, or
        the model has no tower to adapt.
    """
    if isinstance(config, CausalLM):
        raise Refusal(f"lora requires the built-in decoder, but the model is {config.name}; set lora=None")
    declared = declare(config, head)
    stacks = {name: declared[name] for name in STACKS if name in declared}
    shared = set.intersection(*(_matrices(layer) | _absent(config, name) for name, layer in stacks.items()))
    missing = [name for name in lora.targets if name not in shared]
    if missing and lora.part != "tower":
        there = ", ".join(name for name in Lora.MATRICES if name in shared)
        raise Refusal(
            f"lora.targets has {', '.join(missing)}, but all layers of this model have {there}; choose from these"
        )
    tree: dict[str, Any] = {}
    if lora.part != "tower":
        tree = {stack: _in_rooms(layer, lora) for stack, layer in stacks.items()}
    if lora.part != "decoder":
        if VISION not in declared:
            raise Refusal(
                f"lora.part={lora.part!r} requires a model with a vision tower; set vision=True, or lora.part='decoder'"
            )
        tree[VISION] = {"layers": _in_rooms(declared[VISION]["layers"], lora)}
    return tree if head == "lm" else tree | {"head": declared["head"]}


def _absent(config: ModelConfig, stack: str) -> set[str]:
    """Return the matrices that layers of a stack may lack while other layers have them adapted."""
    if stack == LINEAR_LAYERS:
        return {"query", "key", "value"}
    if stack == LAYERS and config.full_heads is not None and config.full_heads.values_are_keys:
        return {"value"}
    return {"key", "value"} if stack in LENDERS else set()


def _in_rooms(layer: dict[str, Any], lora: Lora) -> dict[str, Any]:
    """Declare the adapters of stacked layers, in their attention and MLP."""
    return {
        room: {name: _adapter(name, layer[room][name], lora) for name in layer[room] if name in lora.targets}
        for room in ROOMS
        if not set(lora.targets).isdisjoint(layer[room])
    }


def _matrices(layer: dict[str, Any]) -> set[str]:
    """Return the names of a layer's matrices that are a single matrix product: no bias, norm or stack of experts."""
    return {
        name
        for room in ROOMS
        for name, param in layer[room].items()
        if name in Lora.MATRICES and math.prod(param.shape[1 : 1 + INPUTS.get(name, 1)]) == param.fan_in
    }


def _adapter(name: str, param: Param, lora: Lora) -> Adapter:
    inputs = 1 + INPUTS.get(name, 1)
    layers, rank = param.shape[:1], (lora.rank,)
    return Adapter(
        # The variance of peft's uniform initialization, so that learning rates for peft work here.
        down=Param(param.shape[:inputs] + rank, (*param.dims[:inputs], None), fan_in=3 * param.fan_in),
        up=Param((*layers, *rank, *param.shape[inputs:]), (param.dims[0], None, *param.dims[inputs:]), "zeros"),
        scale=lora.scale,
    )


def adapter_dims(config: AnyModel, head: Head, lora: Lora) -> dict[str, Any]:
    """Return the dimension names of the adapters and the head."""
    return jax.tree.map(lambda param: param.dims, declare_adapters(config, head, lora))


def adapter_shapes(config: AnyModel, head: Head, lora: Lora) -> dict[str, Any]:
    """Return the float32 shapes of the adapters and the head."""
    return jax.tree.map(
        lambda param: jax.ShapeDtypeStruct(param.shape, jnp.float32), declare_adapters(config, head, lora)
    )


def adapted(params: Any, adapters: Any) -> Any:
    """Merge adapters into the parameters, and add entries that only the adapters' tree has. No array is created."""
    if isinstance(adapters, Adapter):
        return Adapted(params, adapters)
    if not isinstance(adapters, dict):
        return adapters
    params = params or {}
    return {**params, **{name: adapted(params.get(name), part) for name, part in adapters.items()}}


def is_matrix(path: str) -> bool:
    """Return whether a parameter is a matrix of a layer, matrices of experts included."""
    names = path.split(".")
    return names[0] in STACKS and names[-1] in Lora.MATRICES


def quantized(tree: Any, kind: Format, one: Callable[[Any], Quantized] | None = None, is_leaf: Any = None) -> Any:
    """Quantize the matrices of layers in a tree like the parameters.

    Args:
      one: Function that quantizes a leaf, for trees whose leaves are not arrays.
      is_leaf: Test of a leaf, for `jax.tree.map`.
    """

    def each(path: tuple[Any, ...], leaf: Any) -> Any:
        if not is_matrix(path_name(path)):
            return leaf
        return quantize(leaf, kind) if one is None else one(leaf)

    return jax.tree.map_with_path(each, tree, is_leaf=is_leaf)


def change_of(adapter: Adapter) -> jax.Array:
    """Compute `scale * down @ up` of stacked layers, with the dimensions of the weight."""
    layers, *inputs, rank = adapter.down.shape
    outputs = adapter.up.shape[2:]
    down_LDR, up_LRF = adapter.down.reshape(layers, -1, rank), adapter.up.reshape(layers, rank, -1)
    change_LDF = jnp.einsum("LDR,LRF->LDF", down_LDR, up_LRF, precision=jax.lax.Precision.HIGHEST)
    return adapter.scale * change_LDF.reshape(layers, *inputs, *outputs)
