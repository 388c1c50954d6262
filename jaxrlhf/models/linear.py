"""Products of activations with weights."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrlhf.batch import Array


def project(input_D: Array, weight: Array, *, dims: int = 1) -> Array:
    """Contract the last `dims` dimensions of the input with the first of the weight, in the input's dtype.

    All dimensions that are kept become one on either side, so that every backend sees a plain
    matrix product, in the backward pass too; XLA:CPU computes a gradient that sums over several
    dimensions on one core.
    """
    kept, inner = input_D.shape[: input_D.ndim - dims], weight.shape[:dims]
    size = 1
    for each in inner:
        size *= each
    matrix_DF = weight.astype(input_D.dtype).reshape(size, -1)
    return _product(input_D.reshape(-1, size), matrix_DF).reshape(*kept, *weight.shape[dims:])


@jax.custom_vjp
def _product(input_TD: Array, weight_DF: Array) -> Array:
    return jnp.matmul(input_TD, weight_DF)


def _forward(input_TD: Array, weight_DF: Array) -> tuple[Array, tuple[Array, Array]]:
    return jnp.matmul(input_TD, weight_DF), (input_TD, weight_DF)


def _backward(saved: tuple[Array, Array], change_TF: Array) -> tuple[Array, Any]:
    input_TD, weight_DF = saved
    return jnp.matmul(change_TF, weight_DF.T), transposed_product(input_TD, change_TF, weight_DF.dtype)


_product.defvjp(_forward, _backward)


def transposed_product(input_TD: Array, change_TF: Array, dtype: Any) -> Array:
    """`input.T @ change`, the gradient of a weight."""
    input_DT = input_TD.T
    if jax.default_backend() == "cpu":
        # Written out, because XLA:CPU's product with a transposed left side takes twice as long.
        input_DT = lax.optimization_barrier(input_DT)
    return jnp.matmul(input_DT, change_TF, preferred_element_type=dtype)
