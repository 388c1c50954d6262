"""Products of activations with weights, which may be quantised and may have an adapter."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxrlhf.batch import Array
from jaxrlhf.models.lora.quantized import Quantized

MANY_INPUTS, MANY_WEIGHTS = 512, 2**19
"""From so many of both on, a weight is the left factor in products of few tokens on CPU."""


@struct.dataclass
class Adapter:
    """A low-rank change of a weight: `scale * down @ up`.

    Attributes:
      down: The weight's input dimensions, then the rank.
      up: The rank, then the weight's output dimensions.
    """

    down: Any
    up: Any
    scale: float = struct.field(pytree_node=False)


@struct.dataclass
class Adapted:
    """A weight with its adapter, in the weight's place in the tree."""

    weight: Any
    adapter: Adapter


@struct.dataclass
class Turned:
    """A weight with its outputs first, as products of few tokens read it fastest on CPU.

    Attributes:
      weight_FD: All of its outputs as one dimension, all of its inputs as the other.
      outputs: Its output dimensions.
    """

    weight_FD: Any
    outputs: tuple[int, ...] = struct.field(pytree_node=False)


Weight = Array | Quantized | Adapted


def project(input_D: Array, weight: Weight | Turned, *, dims: int = 1) -> Array:
    """Contract the last `dims` dimensions of the input with the first of the weight, in the input's dtype.

    An adapter is applied beside its weight; their sum is never made:

        y = x W + (scale * (x down)) up

    All dimensions that are kept become one on either side, so that every backend sees a plain
    matrix product, in the backward pass too; XLA:CPU computes a gradient that sums over several
    dimensions on one core.
    """
    if isinstance(weight, Adapted):
        adapter = weight.adapter
        narrow_R = adapter.scale * project(input_D, adapter.down, dims=dims)
        return project(input_D, weight.weight, dims=dims) + project(narrow_R, adapter.up)
    kept, inner = input_D.shape[: input_D.ndim - dims], input_D.shape[input_D.ndim - dims :]
    input_TD = input_D.reshape(-1, math.prod(inner))
    if isinstance(weight, Turned):
        return few_rows_product(input_TD, weight.weight_FD.astype(input_D.dtype)).reshape(*kept, *weight.outputs)
    output_TF = _frozen_product(input_TD, weight) if isinstance(weight, Quantized) else _product(input_TD, weight)
    return output_TF.reshape(*kept, *weight.shape[dims:])


def for_few_tokens(weight: Weight, *, dims: int = 1) -> Weight | Turned:
    """The weight as a decode loop wants it: on CPU with its outputs first, elsewhere as it is.

    Args:
      dims: Of its dimensions, those of its inputs.
    """
    if isinstance(weight, Adapted):
        return Adapted(for_few_tokens(weight.weight, dims=dims), weight.adapter)
    inputs, outputs = weight.shape[:dims], weight.shape[dims:]
    if isinstance(weight, Quantized) or not _reads_rows(math.prod(inputs), math.prod(outputs)):
        return weight
    return Turned(weight.reshape(-1, math.prod(outputs)).T, outputs)


def few_rows_product(input_TD: Array, weight_FD: Array, dtype: Any = None) -> Array:
    """`input @ weight.T`; on CPU as the transpose of `weight @ input.T`, which reads large weights twice as fast."""
    if not _reads_rows(*reversed(weight_FD.shape)):
        return jnp.einsum("TD,FD->TF", input_TD, weight_FD, preferred_element_type=dtype)
    output_FT = jnp.einsum("FD,TD->FT", weight_FD, input_TD, preferred_element_type=dtype)
    # Without a barrier XLA would merge the transposes, and be back at the other product.
    return lax.optimization_barrier(output_FT).T


def _reads_rows(inputs: int, outputs: int) -> bool:
    """Whether a weight is the left factor: for a few inputs it costs more to transpose the result, and a small weight
    stays in the cache of a core."""
    return jax.default_backend() == "cpu" and inputs >= MANY_INPUTS and inputs * outputs >= MANY_WEIGHTS


def side_by_side(weights: Sequence[Weight], join: Callable[[list[Array]], Array]) -> Weight:
    """Weights of one input as one; the ranks of their adapters lie one after another.

    Args:
      join: Puts weights, or what is shaped like them but for their inputs, side by side along their outputs.
    """
    own = {place: weight.adapter for place, weight in enumerate(weights) if isinstance(weight, Adapted)}
    plain = [weight.weight if isinstance(weight, Adapted) else weight for weight in weights]
    joined = jax.tree.map(lambda *parts: join(list(parts)), *plain)
    if not own:
        return joined

    def up(place: int) -> Array:
        """Zero in the outputs of the others."""
        up_R = own[place].up
        blocks = [jnp.zeros((len(up_R), *weight.shape[1:]), up_R.dtype) for weight in plain]
        return join([*blocks[:place], up_R, *blocks[place + 1 :]])

    [scale] = {adapter.scale for adapter in own.values()}
    down = jnp.concatenate([adapter.down for adapter in own.values()], axis=-1)
    return Adapted(joined, Adapter(down, jnp.concatenate([up(place) for place in own], axis=0), scale))


@jax.custom_vjp
def _frozen_product(input_TD: Array, weight: Quantized) -> Array:
    # Tied to the input, or a loop over tokens would be given the floats of all layers at once.
    weight, input_TD = lax.optimization_barrier((weight, input_TD))
    return jnp.matmul(input_TD, weight.astype(input_TD.dtype).reshape(input_TD.shape[-1], -1))


def _frozen_forward(input_TD: Array, weight: Quantized) -> tuple[Array, Quantized]:
    return _frozen_product(input_TD, weight), weight


def _frozen_backward(weight: Quantized, change_TF: Array) -> tuple[Array, None]:
    # Its floats are made again, so that none wait for the backward pass.
    weight_DF = weight.astype(change_TF.dtype).reshape(-1, change_TF.shape[-1])
    return jnp.matmul(change_TF, weight_DF.T), None


_frozen_product.defvjp(_frozen_forward, _frozen_backward)


@jax.custom_vjp
def _product(input_TD: Array, weight: Array) -> Array:
    return jnp.matmul(input_TD, _matrix(weight, input_TD))


def _forward(input_TD: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    # The weight as it came, or a cast and reshaped copy of every layer's would wait for the backward pass.
    return _product(input_TD, weight), (input_TD, weight)


def _backward(saved: tuple[Array, Array], change_TF: Array) -> tuple[Array, Any]:
    input_TD, weight = saved
    change = transposed_product(input_TD, change_TF, input_TD.dtype).astype(weight.dtype).reshape(weight.shape)
    return jnp.matmul(change_TF, _matrix(weight, input_TD).T), change


_product.defvjp(_forward, _backward)


def _matrix(weight: Array, input_TD: Array) -> Array:
    """In the input's dtype, with all dimensions that are kept as one."""
    return weight.astype(input_TD.dtype).reshape(input_TD.shape[-1], -1)


def transposed_product(input_TD: Array, change_TF: Array, dtype: Any) -> Array:
    """`input.T @ change`, the gradient of a weight."""
    input_DT = input_TD.T
    if jax.default_backend() == "cpu":
        # Written out, because XLA:CPU's product with a transposed left side takes twice as long.
        input_DT = lax.optimization_barrier(input_DT)
    return jnp.matmul(input_DT, change_TF, preferred_element_type=dtype)
