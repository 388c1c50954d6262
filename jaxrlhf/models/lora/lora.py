"""Low-rank adapters: their declaration, and trees of weights with and without them.

Adapters are a tree of their own: an `Adapter` at the place of each adapted weight, and the head if it is
trained. `adapted` lays that tree over the parameters.
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
"""Number of input dimensions of a matrix, where that is not one."""


def declare_adapters(config: AnyModel, head: Head, lora: Lora) -> dict[str, Any]:
    """The tree of `Param` that is trained in place of the parameters: adapters, and a value or score head.

    Raises:
      Refusal: Some layers have no such matrix, or one in each expert, or they are a model's of the user's own.
    """
    if isinstance(config, CausalLM):
        raise Refusal(f"lora adapts matrices of the decoder, and the model is {config.name}; drop lora")
    declared = declare(config, head)
    stacks = {name: declared[name] for name in STACKS if name in declared}
    shared = set.intersection(*(_matrices(layer) | _absent(config, name) for name, layer in stacks.items()))
    missing = [name for name in lora.targets if name not in shared]
    if missing and lora.part != "tower":
        there = ", ".join(name for name in Lora.MATRICES if name in shared)
        raise Refusal(f"lora.targets has {', '.join(missing)}, and all layers of this model have {there}; choose some")
    tree: dict[str, Any] = {}
    if lora.part != "tower":
        tree = {stack: _in_rooms(layer, lora) for stack, layer in stacks.items()}
    if lora.part != "decoder":
        if VISION not in declared:
            raise Refusal(f"lora.part={lora.part!r}, and the model reads text alone; give vision=True, or drop part")
        tree[VISION] = {"layers": _in_rooms(declared[VISION]["layers"], lora)}
    return tree if head == "lm" else tree | {"head": declared["head"]}


def _absent(config: ModelConfig, stack: str) -> set[str]:
    """Matrices that layers of a stack need not have for others to be adapted."""
    if stack == LINEAR_LAYERS:
        return {"query", "key", "value"}
    if stack == LAYERS and config.full_heads is not None and config.full_heads.values_are_keys:
        return {"value"}
    return {"key", "value"} if stack in LENDERS else set()


def _in_rooms(layer: dict[str, Any], lora: Lora) -> dict[str, Any]:
    """Adapters of stacked layers, in their attention and MLP."""
    return {
        room: {name: _adapter(name, layer[room][name], lora) for name in layer[room] if name in lora.targets}
        for room in ROOMS
        if not set(lora.targets).isdisjoint(layer[room])
    }


def _matrices(layer: dict[str, Any]) -> set[str]:
    """Names of the matrices of a layer that are one product: no bias, no norm, no stack of experts."""
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
        # The variance of peft's uniform draw, so that its learning rates serve here.
        down=Param(param.shape[:inputs] + rank, (*param.dims[:inputs], None), fan_in=3 * param.fan_in),
        up=Param((*layers, *rank, *param.shape[inputs:]), (param.dims[0], None, *param.dims[inputs:]), "zeros"),
        scale=lora.scale,
    )


def adapter_dims(config: AnyModel, head: Head, lora: Lora) -> dict[str, Any]:
    """Dimension names of the adapters and the head."""
    return jax.tree.map(lambda param: param.dims, declare_adapters(config, head, lora))


def adapter_shapes(config: AnyModel, head: Head, lora: Lora) -> dict[str, Any]:
    """Float32 shapes of the adapters and the head."""
    return jax.tree.map(
        lambda param: jax.ShapeDtypeStruct(param.shape, jnp.float32), declare_adapters(config, head, lora)
    )


def adapted(params: Any, adapters: Any) -> Any:
    """The parameters with adapters laid over them, and what they lack filled in. No array is made."""
    if isinstance(adapters, Adapter):
        return Adapted(params, adapters)
    if not isinstance(adapters, dict):
        return adapters
    params = params or {}
    return {**params, **{name: adapted(params.get(name), part) for name, part in adapters.items()}}


def is_matrix(path: str) -> bool:
    """Return whether a parameter is a matrix of layers, experts' included."""
    names = path.split(".")
    return names[0] in STACKS and names[-1] in Lora.MATRICES


def quantized(tree: Any, kind: Format, one: Callable[[Any], Quantized] | None = None, is_leaf: Any = None) -> Any:
    """The parameters, or a tree like them, with the matrices of layers quantised.

    Args:
      one: Function of such a leaf, where the tree is not one of arrays.
      is_leaf: Test of a leaf, for `jax.tree.map`.
    """

    def each(path: tuple[Any, ...], leaf: Any) -> Any:
        if not is_matrix(path_name(path)):
            return leaf
        return quantize(leaf, kind) if one is None else one(leaf)

    return jax.tree.map_with_path(each, tree, is_leaf=is_leaf)


def change_of(adapter: Adapter) -> jax.Array:
    """`scale * down @ up` of stacked layers, with the weight's dimensions."""
    layers, *inputs, rank = adapter.down.shape
    outputs = adapter.up.shape[2:]
    down_LDR, up_LRF = adapter.down.reshape(layers, -1, rank), adapter.up.reshape(layers, rank, -1)
    change_LDF = jnp.einsum("LDR,LRF->LDF", down_LDR, up_LRF, precision=jax.lax.Precision.HIGHEST)
    return adapter.scale * change_LDF.reshape(layers, *inputs, *outputs)
