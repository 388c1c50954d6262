"""Multi-head latent attention (MLA): keys and values of all heads are made from one short vector for each token.

The cache holds this vector (the latent) and one rotated key for all heads. For rows, keys and values are computed from
the latents. For a decoded token, the matrices are applied to its query and its output instead, so that no array is as
wide as all heads for every position of the cache:

    q_n . (U_n c_s) = (q_n U_n) . c_s    and    sum_s w_s (V_n c_s) = V_n sum_s w_s c_s

Source: DeepSeek-AI 2024 (DeepSeek-V2, arXiv:2405.04434), section 2.1.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrlhf.batch import Array, Params
from jaxrlhf.models import linear
from jaxrlhf.models.attention.kv_cache import LayerCache
from jaxrlhf.models.attention.score_mod import ScoreMod, mask_bias
from jaxrlhf.models.attention.softmax_parts import joined, of_devices, part_of, seen_of_device
from jaxrlhf.models.config import LatentAttention, ModelConfig
from jaxrlhf.models.execution import ONE_DEVICE, Execution
from jaxrlhf.models.norm import norm
from jaxrlhf.models.rope import Rotation, rotate

_EPS = 1e-6
"""Number added under the root of norms inside attention, independent of the model's `rms_norm_eps`."""


def latents(
    attention: Params, config: ModelConfig, latent: LatentAttention, input_RWD: Array, turn: Rotation
) -> tuple[Array, Array, Array]:
    """Compute a layer's queries, the rotated key `[R, W, 1, X]` of all heads, and the latents `[R, W, 1, C]`.

    The rotated part of a query comes last. The cache keeps the key and the latents.
    """
    query_input = input_RWD
    if latent.query_rank is not None:
        query_input = norm(
            config, linear.project(input_RWD, attention["query_down"]), attention["query_norm"], eps=_EPS
        )
    query_RWNH = linear.project(query_input, attention["query"])
    plain = config.head_dim - latent.rope_dim
    turned_RWNX = rotate(query_RWNH[..., plain:], turn, interleaved=latent.interleaved)
    both_RWC = linear.project(input_RWD, attention["latent"])
    key_RW1X = rotate(both_RWC[:, :, None, latent.rank :], turn, interleaved=latent.interleaved)
    latent_RWC = norm(config, both_RWC[..., : latent.rank], attention["latent_norm"], eps=_EPS)
    query_RWNH = jnp.concatenate([query_RWNH[..., :plain], turned_RWNX], axis=-1)
    return query_RWNH, key_RW1X, latent_RWC[:, :, None]


def expanded(
    key_value_CNU: Any, config: ModelConfig, latent: LatentAttention, key_RW1X: Array, latent_RW1C: Array
) -> tuple[Array, Array]:
    """Compute keys and values of the heads of `key_value_CNU` from the rotated key and the latents."""
    plain = config.head_dim - latent.rope_dim
    both_RWNU = linear.project(latent_RW1C[:, :, 0], key_value_CNU)
    turned_RWNX = jnp.broadcast_to(key_RW1X, (*both_RWNU.shape[:3], latent.rope_dim))
    return jnp.concatenate([both_RWNU[..., :plain], turned_RWNX], axis=-1), both_RWNU[..., plain:]


def attend_latents(
    attention: Params,
    config: ModelConfig,
    latent: LatentAttention,
    query_BNH: Array,
    stored: LayerCache,
    position_B: Array,
    score_mod: ScoreMod,
    *,
    execution: Execution = ONE_DEVICE,
) -> Array:
    """Attend with one query per slot to a cache of rotated keys and latents."""
    plain = config.head_dim - latent.rope_dim
    key_value_CNU = attention["key_value"].astype(query_BNH.dtype)
    key_B1XS, latent_B1SC = stored
    query_BNC = jnp.einsum("BNH,CNH->BNC", query_BNH[..., :plain], key_value_CNU[..., :plain])
    assert score_mod.sink_N is None, "latent attention does not support sinks"

    def scores(query_BNX: Array, query_BNC: Array, key_B1XS: Array, latent_B1SC: Array) -> Array:
        product = {"preferred_element_type": jnp.float32}
        logit_BNS = jnp.einsum("BNX,BXS->BNS", query_BNX, key_B1XS[:, 0], **product)
        logit_BNS += jnp.einsum("BNC,BSC->BNS", query_BNC.astype(latent_B1SC.dtype), latent_B1SC[:, 0], **product)
        return score_mod.cap(logit_BNS / score_mod.divide_by(config.head_dim))

    def mixed_of_own(query_BNX: Array, query_BNC: Array, key_B1XS: Array, latent_B1SC: Array, position_B: Array):
        own = seen_of_device(position_B, stored.capacity, score_mod, execution)
        part = part_of(scores(query_BNX, query_BNC, key_B1XS, latent_B1SC)[:, None], *own, latent_B1SC)
        return joined([of_devices(part, execution.cache_axes)], like=query_BNC.astype(latent_B1SC.dtype))

    arrays = query_BNH[..., plain:], query_BNC, key_B1XS, latent_B1SC
    if execution.cache_ways > 1:
        slot, axes = PartitionSpec(execution.row_axes), execution.cache_axes
        head = PartitionSpec(execution.row_axes, execution.head_axes)
        kept = (PartitionSpec(execution.row_axes, None, *rest) for rest in ((None, axes), (axes,)))
        mixed_BNC = execution.on_devices(mixed_of_own, (head, head, *kept, slot), head)(*arrays, position_B)
    else:
        # A finished slot may have run past its cache: clip, so that it still sees a position.
        newest_B = jnp.minimum(position_B, stored.capacity - 1)
        seen_BS = score_mod.in_window(newest_B[:, None] - jnp.arange(stored.capacity)[None, :])
        weight_BNS = jax.nn.softmax(scores(*arrays) + mask_bias(seen_BS)[:, None], axis=-1)
        mixed_BNC = jnp.einsum("BNS,BSC->BNC", weight_BNS.astype(latent_B1SC.dtype), latent_B1SC[:, 0])
    return jnp.einsum("BNC,CNU->BNU", mixed_BNC.astype(query_BNH.dtype), key_value_CNU[..., plain:])
