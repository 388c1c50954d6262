"""Products of activations with weights, which may be quantised and may have an adapter."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxrlhf.batch import Array
from jaxrlhf.models.quantized import Quantized


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


def project(input_D: Array, weight: Array | Quantized | Adapted, *, dims: int = 1) -> Array:
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
    kept, inner = input_D.shape[: input_D.ndim - dims], weight.shape[:dims]
    size = 1
    for each in inner:
        size *= each
    input_TD = input_D.reshape(-1, size)
    if isinstance(weight, Quantized):
        output_TF = _frozen_product(input_TD, weight)
    else:
        output_TF = _product(input_TD, weight.astype(input_D.dtype).reshape(size, -1))
    return output_TF.reshape(*kept, *weight.shape[dims:])


def side_by_side(
    weights: Sequence[Array | Quantized | Adapted], join: Callable[[list[Array]], Array]
) -> Array | Quantized | Adapted:
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
