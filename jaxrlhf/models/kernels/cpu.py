"""Variants for XLA:CPU: gradients written as matrix products, and weight layouts for fast products of few rows."""

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxrlhf.batch import Array
from jaxrlhf.sharding.described import platform

F = TypeVar("F", bound=Callable[..., Any])

MANY_INPUTS, MANY_WEIGHTS = 512, 2**19
"""Fewest inputs, and fewest entries, of a weight that becomes the left factor of its products.

For smaller weights, transposing the result costs more than it saves.
"""


def variant(faster: Callable[..., Any]) -> Callable[[F], F]:
    """Decorate a reference function with a variant that computes the same result faster on CPUs.

    Both functions have the same signature. The platform is checked while a program is traced.
    """

    def decorate(reference: F) -> F:
        @wraps(reference)
        def choose(*arguments: Any) -> Any:
            return (faster if platform() == "cpu" else reference)(*arguments)

        return choose  # type: ignore[return-value]

    return decorate


@struct.dataclass
class Transposed:
    """Transposed weight: output dimensions first.

    Attributes:
      weight_FD: Matrix of the weight, with all output dimensions merged into F and all input dimensions into D.
      outputs: Sizes of the output dimensions.
    """

    weight_FD: Any
    outputs: tuple[int, ...] = struct.field(pytree_node=False)


def transposed(weight: Array, dims: int) -> Array | Transposed:
    """Return a weight for products of few rows; large weights are transposed."""
    inputs, outputs = weight.shape[:dims], weight.shape[dims:]
    if not _is_left_factor(math.prod(inputs), math.prod(outputs)):
        return weight
    return Transposed(weight.reshape(-1, math.prod(outputs)).T, outputs)


def few_rows_product(input_TD: Array, weight_FD: Array, dtype: Any = None) -> Array:
    """Compute `input @ weight.T`; for large weights as the transpose of `weight @ input.T`, which is twice as fast."""
    if not _is_left_factor(*reversed(weight_FD.shape)):
        return jnp.einsum("TD,FD->TF", input_TD, weight_FD, preferred_element_type=dtype)
    output_FT = jnp.einsum("FD,TD->FT", weight_FD, input_TD, preferred_element_type=dtype)
    # Without a barrier XLA would merge the transposes into the slower product.
    return lax.optimization_barrier(output_FT).T


def _is_left_factor(inputs: int, outputs: int) -> bool:
    return inputs >= MANY_INPUTS and inputs * outputs >= MANY_WEIGHTS


def transposed_product(input_TD: Array, change_TF: Array, dtype: Any) -> Array:
    """Compute `input.T @ change` with a materialized transpose, since XLA:CPU is slow with a transposed left factor."""
    return jnp.matmul(lax.optimization_barrier(input_TD.T), change_TF, preferred_element_type=dtype)


@jax.custom_vjp
def product(input_TD: Array, weight: Array) -> Array:
    """Compute `input @ weight`; the gradient of the weight is a `transposed_product`."""
    return jnp.matmul(input_TD, _matrix(weight, input_TD))


def _product_forward(input_TD: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return product(input_TD, weight), (input_TD, weight)


def _product_backward(saved: tuple[Array, Array], change_TF: Array) -> tuple[Array, Array]:
    input_TD, weight = saved
    change = transposed_product(input_TD, change_TF, input_TD.dtype).astype(weight.dtype).reshape(weight.shape)
    return jnp.matmul(change_TF, _matrix(weight, input_TD).T), change


product.defvjp(_product_forward, _product_backward)


def _matrix(weight: Array, input_TD: Array) -> Array:
    return weight.astype(input_TD.dtype).reshape(input_TD.shape[-1], -1)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(input_D: Array, scale_D: Array, eps: float) -> Array:
    """Compute the RMS norm, with this gradient, where n = x / sqrt(mean(x^2) + eps) and g is the gradient of n:

        dx = (g - n mean(g n)) / sqrt(mean(x^2) + eps)        dscale = sum(dy n)

    The sums are computed as products with ones, which XLA:CPU runs on all cores.
    """
    return _rms_norm_forward(input_D, scale_D, eps)[0]


def _rms_norm_forward(input_D: Array, scale_D: Array, eps: float) -> tuple[Array, tuple[Array, Array, Array]]:
    wide_D = input_D.astype(jnp.float32)
    inverse_1 = lax.rsqrt(jnp.mean(jnp.square(wide_D), axis=-1, keepdims=True) + eps)
    return (wide_D * inverse_1 * _like(input_D, scale_D)).astype(input_D.dtype), (input_D, inverse_1, scale_D)


def _rms_norm_backward(eps: float, saved: tuple[Array, Array, Array], change_D: Array) -> tuple[Array, Array]:
    input_D, inverse_1, scale_D = saved
    normed_D, wide_D = input_D.astype(jnp.float32) * inverse_1, change_D.astype(jnp.float32)
    inner_D = wide_D * _like(input_D, scale_D)
    width = input_D.shape[-1]
    sum_1 = (inner_D * normed_D).reshape(-1, width) @ jnp.ones((width, 1), jnp.float32)
    mean_1 = sum_1.reshape(*input_D.shape[:-1], 1) / width
    change_D = inverse_1 * (inner_D - normed_D * mean_1)
    scaled_TD = (wide_D * normed_D).reshape(-1, width)
    return change_D.astype(input_D.dtype), (jnp.ones((1, len(scaled_TD)), jnp.float32) @ scaled_TD)[0]


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def _like(input_D: Array, scale_D: Array) -> Array:
    return jnp.expand_dims(scale_D, tuple(range(input_D.ndim - 1)))


def look_up(function: Callable[[Array], Any], position_RW: Array, longest: int | None) -> Any:
    """Evaluate a function of positions by a table of all positions below `longest`; None evaluates without a table.

    A decode loop computes the table once. Without a table XLA:CPU would compute cosines in every layer, for every head.
    """
    if longest is None:
        return function(position_RW)
    table_1S = function(jnp.arange(longest)[None, :])
    return jax.tree.map(lambda leaf_1S: leaf_1S[0].at[position_RW].get(mode="clip"), table_1S)
