"""Router training of a mixture of experts: load-balancing loss, metrics, and router replay (R3)."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.batch import ROUTING, Array
from jaxrlhf.batching.packing import PackedBatch
from jaxrlhf.config import Refusal
from jaxrlhf.models.causal_lm import AnyModel
from jaxrlhf.models.moe.experts import RouterInputs, RouterOutputs


def router_coefficient(config: AnyModel, wanted: float | None, *, role: str) -> float:
    """Return the coefficient of the load-balancing loss: the configured one, or else the checkpoint's.

    Raises:
      Refusal: A coefficient is configured for a model without experts.
    """
    if config.experts is None:
        if wanted is not None:
            raise Refusal(
                f"{role}.router_loss={wanted} balances experts, but this model has no experts; set router_loss=None"
            )
        return 0.0
    return config.experts.loss_coefficient if wanted is None else wanted


def router_inputs(rows: PackedBatch) -> RouterInputs:
    """Return the router inputs: response tokens by sequence, since the load is balanced over each sequence alone."""
    return RouterInputs(jnp.where(rows.mask_RW, rows.segment_RW, 0))


def router_metrics(routed: RouterOutputs, rows: PackedBatch, config: AnyModel, *, role: str) -> dict[str, Any]:
    """Return router metrics per token, averaged over layers; the trainer averages them over the mask.

    The imbalance, the load of the busiest expert over the mean load, is one number per microbatch, repeated per token.
    """
    assert config.experts is not None and routed.loss_RW is not None
    count = config.experts.count

    def load(choice_RWk: Array) -> Array:
        chosen = jnp.broadcast_to(rows.mask_RW[:, :, None], choice_RWk.shape).astype(jnp.float32)
        return jnp.zeros(count).at[choice_RWk.reshape(-1)].add(chosen.reshape(-1))

    replay = {}
    if ROUTING in rows.recorded:
        used_LRWk = jnp.moveaxis(rows.recorded[ROUTING], 2, 0)
        kept_LRWk = (routed.choice_RWk[..., :, None] == used_LRWk[..., None, :]).any(axis=-1)
        changed_LRWk = ~kept_LRWk & (used_LRWk[..., :1] >= 0)
        replay = {f"router/{role}_disagreement": changed_LRWk.mean(axis=(0, 3))}
    load_LE = jax.vmap(load)(routed.choice_RWk)
    busiest = (count * load_LE.max(axis=1) / jnp.maximum(load_LE.sum(axis=1), 1.0)).mean()
    return {
        f"router/{role}_loss": jax.lax.stop_gradient(routed.loss_RW.mean(axis=0)),
        f"router/{role}_entropy": routed.entropy_RW.mean(axis=0),
        f"router/{role}_imbalance": jnp.broadcast_to(busiest, rows.mask_RW.shape),
        **replay,
    }
