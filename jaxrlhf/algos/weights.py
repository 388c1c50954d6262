"""Loss aggregation as per-token weights, so that a trainer only ever computes one sum.

Denominators are counts over all rows of one optimizer update. Packing, microbatches and devices therefore cannot change
the loss.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxrlhf.algos.groups import dense_ids, group_sum
from jaxrlhf.batch import Array
from jaxrlhf.config import Aggregation


def token_weights(
    mask_BT: Bool[Array, "B T"],
    prompt_id_B: Int[Array, "B"] | None = None,
    *,
    aggregation: Aggregation,
    horizon: int | float | None = None,
) -> Float[Array, "B T"]:
    """Compute the weights for which `sum(weight * token_loss)` is the aggregated loss; 0 outside the mask.

        token-mean               1 / tokens
        token-sum                1
        seq-mean-token-mean      1 / (sequences * tokens of the sequence)
        seq-mean-token-sum       1 / sequences
        seq-mean-token-sum-norm  1 / (sequences * horizon)
        prompt-mean              1 / (prompts * tokens of the prompt's sequences)

    Only trained tokens count, and only sequences and prompts with trained tokens. Without trained tokens all weights
    are 0.

    Args:
      mask_BT: Trained tokens of all rows of one optimizer update.
      prompt_id_B: Id of each row's prompt; needed by prompt-mean.
      horizon: Longest response that the configuration allows, in tokens (not the padded width, which changes from batch
        to batch); needed by seq-mean-token-sum-norm.

    Raises:
      ValueError: The aggregation is unknown, or lacks an argument that it needs.

    Source: token-mean is eq. 12 of Yu et al. 2025 (DAPO, arXiv:2503.14476), seq-mean-token-mean eq. 3 of Shao et al.
    2024 (arXiv:2402.03300), seq-mean-token-sum-norm section 3 of Liu et al. 2025 (arXiv:2503.20783), prompt-mean is in
    Khatri et al. 2025 (ScaleRL, arXiv:2510.13786).
    """
    tokens_B = jnp.asarray(mask_BT, int).sum(1)
    per_sequence = _inverse(jnp.count_nonzero(tokens_B))
    weight: Array | float
    match aggregation:
        case "token-mean":
            weight = _inverse(tokens_B.sum())
        case "token-sum":
            weight = 1.0
        case "seq-mean-token-mean":
            weight = per_sequence * _inverse(tokens_B)
        case "seq-mean-token-sum":
            weight = per_sequence
        case "seq-mean-token-sum-norm":
            if horizon is None or horizon <= 0:
                raise ValueError(
                    f"horizon={horizon}, but aggregation seq-mean-token-sum-norm divides by the maximum response "
                    "length; set a horizon above 0"
                )
            weight = per_sequence / horizon
        case "prompt-mean":
            if prompt_id_B is None:
                raise ValueError("aggregation prompt-mean averages over prompts; pass prompt_id_B")
            weight = _prompt_mean(tokens_B, dense_ids(prompt_id_B))
        case _:
            raise ValueError(f"unknown aggregation {aggregation!r}; see jaxrlhf.config.Aggregation")
    return jnp.where(mask_BT, jnp.broadcast_to(weight, tokens_B.shape)[:, None], 0)


def _prompt_mean(tokens_B: Array, prompt_B: Array) -> Array:
    tokens_of_prompt_P = jax.ops.segment_sum(tokens_B, prompt_B, num_segments=len(tokens_B))
    return _inverse(jnp.count_nonzero(tokens_of_prompt_P)) * _inverse(group_sum(tokens_B, prompt_B))


def _inverse(count: Array) -> Array:
    """Return 1 / count, or 1 for a count of 0 (then all tokens are masked anyway)."""
    return 1.0 / jnp.maximum(count, 1)
