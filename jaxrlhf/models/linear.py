"""Products of activations with weights, which may be quantized and may have an adapter; activation functions."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxrlhf.batch import Array
from jaxrlhf.models.kernels import cpu
from jaxrlhf.models.lora.quantized import Quantized

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}
"""Activation functions by name."""


@struct.dataclass
class Adapter:
    """Low-rank adapter of a weight, which adds `scale * down @ up`.

    Attributes:
      down: Array of the weight's input dimensions, then the rank.
      up: Array of the rank, then the weight's output dimensions.
    """

    down: Any
    up: Any
    scale: float = struct.field(pytree_node=False)


@struct.dataclass
class Adapted:
    """Weight with its adapter, in the weight's place in the parameter tree."""

    weight: Any
    adapter: Adapter


Weight = Array | Quantized | Adapted


def project(input_D: Array, weight: Weight | cpu.Transposed, *, dims: int = 1) -> Array:
    """Contract the last `dims` dimensions of the input with the first of the weight, in the input's dtype.

    An adapter is applied next to its weight; their sum is never computed:

        y = x W + (scale * (x down)) up

    The other dimensions are flattened to one, so that forward and backward passes are plain matrix products.
    """
    if isinstance(weight, Adapted):
        adapter = weight.adapter
        narrow_R = adapter.scale * project(input_D, adapter.down, dims=dims)
        return project(input_D, weight.weight, dims=dims) + project(narrow_R, adapter.up)
    kept, inner = input_D.shape[: input_D.ndim - dims], input_D.shape[input_D.ndim - dims :]
    input_TD = input_D.reshape(-1, math.prod(inner))
    if isinstance(weight, cpu.Transposed):
        output_TF = cpu.few_rows_product(input_TD, weight.weight_FD.astype(input_D.dtype))
        return output_TF.reshape(*kept, *weight.outputs)
    output_TF = _frozen_product(input_TD, weight) if isinstance(weight, Quantized) else _product(input_TD, weight)
    return output_TF.reshape(*kept, *weight.shape[dims:])


def few_rows_layout(weight: Weight, *, dims: int = 1) -> Weight | cpu.Transposed:
    """Convert a weight to the layout that is fastest for products with few tokens.

    Args:
      dims: Number of the weight's input dimensions.
    """
    if isinstance(weight, Adapted):
        return Adapted(few_rows_layout(weight.weight, dims=dims), weight.adapter)
    return weight if isinstance(weight, Quantized) else _few_rows_layout(weight, dims)


@cpu.variant(cpu.transposed)
def _few_rows_layout(weight: Array, dims: int) -> Array:
    return weight


@cpu.variant(cpu.few_rows_product)
def few_rows_product(input_TD: Array, weight_FD: Array, dtype: Any = None) -> Array:
    """Compute `input @ weight.T` for few rows."""
    return jnp.einsum("TD,FD->TF", input_TD, weight_FD, preferred_element_type=dtype)


@cpu.variant(cpu.transposed_product)
def transposed_product(input_TD: Array, change_TF: Array, dtype: Any) -> Array:
    """Compute `input.T @ change`, the gradient of a weight."""
    return jnp.matmul(input_TD.T, change_TF, preferred_element_type=dtype)


def side_by_side(weights: Sequence[Weight], join: Callable[[list[Array]], Array]) -> Weight:
    """Join weights with the same input into one weight; the ranks of their adapters are concatenated.

    Args:
      join: Function that puts arrays side by side along their outputs: weights, or arrays with other input
        dimensions and the outputs of the weights.
    """
    adapters = {place: weight.adapter for place, weight in enumerate(weights) if isinstance(weight, Adapted)}
    plain = [weight.weight if isinstance(weight, Adapted) else weight for weight in weights]
    joined = jax.tree.map(lambda *parts: join(list(parts)), *plain)
    if not adapters:
        return joined

    def up(place: int) -> Array:
        """Return `up` of one adapter, with zeros in the outputs of the other weights."""
        up_R = adapters[place].up
        blocks = [jnp.zeros((len(up_R), *weight.shape[1:]), up_R.dtype) for weight in plain]
        return join([*blocks[:place], up_R, *blocks[place + 1 :]])

    [scale] = {adapter.scale for adapter in adapters.values()}
    down = jnp.concatenate([adapter.down for adapter in adapters.values()], axis=-1)
    return Adapted(joined, Adapter(down, jnp.concatenate([up(place) for place in adapters], axis=0), scale))


@jax.custom_vjp
def _frozen_product(input_TD: Array, weight: Quantized) -> Array:
    # The barrier ties the weight to the input; otherwise a loop over tokens would get the floats of all layers at once.
    weight, input_TD = lax.optimization_barrier((weight, input_TD))
    return jnp.matmul(input_TD, weight.astype(input_TD.dtype).reshape(input_TD.shape[-1], -1))


def _frozen_forward(input_TD: Array, weight: Quantized) -> tuple[Array, Quantized]:
    return _frozen_product(input_TD, weight), weight


def _frozen_backward(weight: Quantized, change_TF: Array) -> tuple[Array, None]:
    # The weight is dequantized again, so that no floats are kept for the backward pass.
    weight_DF = weight.astype(change_TF.dtype).reshape(-1, change_TF.shape[-1])
    return jnp.matmul(change_TF, weight_DF.T), None


_frozen_product.defvjp(_frozen_forward, _frozen_backward)


@cpu.variant(cpu.product)
# Without the checkpoint a cast and reshaped copy of every layer's weight would be kept for the backward pass.
@jax.checkpoint
def _product(input_TD: Array, weight: Array) -> Array:
    return jnp.matmul(input_TD, weight.astype(input_TD.dtype).reshape(input_TD.shape[-1], -1))
