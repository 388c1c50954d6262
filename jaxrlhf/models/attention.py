"""Attention of packed rows to themselves, and of one new token to its cache.

`attend` is the interface behind which kernels live; every kernel computes the same function.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jaxrlhf.batch import Array

Kernel = Literal["xla", "cudnn"]

# A faster kernel takes a backend's place here once it has been shown to compute the same
# numbers there, gradients included.
_BEST: dict[str, Kernel] = {"cpu": "xla", "gpu": "xla", "tpu": "xla"}


def attend(
    query_RWNH: Float[Array, "R W N H"],
    key_RWKH: Float[Array, "R W K H"],
    value_RWKH: Float[Array, "R W K H"],
    segment_RW: Int[Array, "R W"],
    *,
    kernel: Kernel | None = None,
) -> Float[Array, "R W N H"]:
    """Causal attention inside each segment of a row; softmax in float32.

        out_t = sum_s softmax_s(q_t . k_s / sqrt(H)) v_s    over s <= t with segment_s = segment_t

    Padding is segment 0 and sees only padding, so no row of the softmax is empty.

    Args:
      kernel: None picks the best one known for the default backend. `cudnn` needs a GPU and
        half precision.
    """
    kernel = kernel or _BEST.get(jax.default_backend(), "xla")
    mask_R1WW = (segment_RW[:, :, None] == segment_RW[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        query_RWNH, key_RWKH, value_RWKH, mask=mask_R1WW, is_causal=True, implementation=kernel
    )


def attend_cache(
    query_BNH: Float[Array, "B N H"],
    key_BKHS: Float[Array, "B K H S"],
    value_BKSH: Float[Array, "B K S H"],
    position_B: Int[Array, "B"],
) -> Float[Array, "B N H"]:
    """One query per slot over its cache entries at index <= position; softmax in float32.

    Keys lie with positions last and values with head width last, so both products stream
    through contiguous memory (on CPU several times faster than positions first).
    """
    slots, kv_heads, head_dim, capacity = key_BKHS.shape
    query_BKGH = query_BNH.reshape(slots, kv_heads, -1, head_dim)
    logit_BKGS = jnp.einsum("BKGH,BKHS->BKGS", query_BKGH, key_BKHS, preferred_element_type=jnp.float32)
    seen_BS = jnp.arange(capacity)[None, :] <= position_B[:, None]
    logit_BKGS = jnp.where(seen_BS[:, None, None, :], logit_BKGS / math.sqrt(head_dim), -jnp.inf)
    weight_BKGS = jax.nn.softmax(logit_BKGS, axis=-1).astype(value_BKSH.dtype)
    return jnp.einsum("BKGS,BKSH->BKGH", weight_BKGS, value_BKSH).reshape(query_BNH.shape)
