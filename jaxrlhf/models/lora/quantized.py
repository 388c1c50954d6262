"""Quantized matrices that are not trained, and are dequantized only where they are used.

Frozen matrices have adapters next to them, as in QLoRA (Dettmers et al. 2023, arXiv:2305.14314) without its second
quantization (of the scales). Other quantized matrices are for generation. `qwix` defines the levels and gets one tile
at a time: it would flatten a whole array into a vector, which the compiler would have to gather from all devices.
"""

import math
from functools import partial
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxrlhf.batch import Array
from jaxrlhf.config import Quantization, Refusal

Format = Quantization | Literal["fp8"]
"""Formats of quantized matrices: a `Quantization` if they are frozen, `int8` or `fp8` if they generate."""

_NAMES = {"fp8": "float8_e4m3fn"}
"""Names of formats in `qwix`, if they differ from ours."""

TILE = 32
"""Most weights of the last dimension that share a scale."""


@struct.dataclass
class Quantized:
    """Quantized weight in the weight's place in the tree: `level[value] * scale`.

    Attributes:
      value: int8 or float8 codes; for nf4 uint8, each with the codes of two neighbors in the last dimension.
      scale: Scales, one for each tile of the last dimension, in the dtype that the weight had; float32 instead of
        float16, which cannot represent numbers as small as scales.
    """

    value: Any
    scale: Any
    kind: Format = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        *before, last = self.value.shape
        return (*before, 2 * last if self.kind == "nf4" else last)

    def astype(self, dtype: Any) -> Array:
        """Dequantize the weight."""
        qwix, code = _qwix(), self.value
        if self.kind == "nf4":
            code = jnp.stack([code & 15, code >> 4], axis=-1)

        def one(code_W: Array, scale_1: Array) -> Array:
            return qwix.dequantize(qwix.QArray(code_W, scale_1, None, _NAMES.get(self.kind, self.kind)))

        tiles = jnp.vectorize(one, signature="(w),(s)->(w)")(code.reshape(*self.scale.shape, -1), self.scale[..., None])
        return tiles.reshape(self.shape).astype(dtype)


def quantize(weight: Array, kind: Format) -> Quantized:
    """Quantize a weight to the nearest levels; the largest weight of each tile is at the last level."""
    qwix, (*before, last) = _qwix(), weight.shape
    tile = math.gcd(TILE, last)
    if tile % 2:
        raise Refusal(f"quantize requires matrices with an even last dimension, got {weight.shape}; set quantize=None")

    def one(weight_W: Array) -> tuple[Array, Array]:
        tile = qwix.quantize(weight_W, _NAMES.get(kind, kind))
        return tile.qvalue, tile.scale

    tiles = weight.astype(jnp.float32).reshape(*before, -1, tile)
    code, scale = jnp.vectorize(one, signature="(w)->(w),(s)")(tiles)
    value = code.reshape(*before, last)
    if kind == "nf4":
        # XLA:CPU stores a 4-bit integer in a byte, and not every transfer between devices supports 4-bit integers.
        value = value.astype(jnp.uint8)
        value = value[..., 0::2] | value[..., 1::2] << 4
    return Quantized(value, scale[..., 0].astype(jnp.promote_types(weight.dtype, jnp.bfloat16)), kind)


def quantize_layers(weight: Array, kind: Format, *, layers: int) -> Quantized:
    """Quantize stacked matrices one layer at a time, since XLA needs much memory for quantization.

    Args:
      layers: Number of layers of one stage; all stages quantize in parallel.
    """
    staged = weight.reshape(-1, layers, *weight.shape[1:])
    made = lax.map(partial(quantize, kind=kind), jnp.moveaxis(staged, 1, 0))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]), made)


def is_quantized(node: Any) -> bool:
    return isinstance(node, Quantized)


def _qwix() -> ModuleType:
    try:
        import qwix
    except ImportError as error:
        raise Refusal(
            f"lora.quantize and rollout.quantize require qwix ({error}): pip install 'jaxrlhf[quantized]'"
        ) from error
    return qwix
