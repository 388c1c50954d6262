"""Metrics of a rollout: scores, lengths, the distance to the reference, the gap between sampler and trainer."""

import jax
import numpy as np

from jaxrlhf.algos import kl_estimate, masked_mean, sampler_gap
from jaxrlhf.batch import KEPT, Array, RolloutBatch, Scores
from jaxrlhf.dataflows.step import Metrics


def rollout_metrics(
    rollout: RolloutBatch, scores: Scores, old_logp_BT: Array | None, ref_logp_BT: Array | None
) -> Metrics:
    """Compute metrics of a rollout and its scores.

    Args:
      old_logp_BT: The trainer's log-probabilities; None omits the gap between sampler and trainer.
      ref_logp_BT: The reference's log-probabilities; None omits the KL to the reference.
    """
    logp_BT = rollout.sampler_logp_BT if old_logp_BT is None else old_logp_BT
    gap_to_BT = None if old_logp_BT is None else rollout.sampler_logp_BT
    mask_BT, kept_BTK = np.asarray(rollout.sequences.mask_BT), rollout.sequences.recorded.get(KEPT)
    kept = {} if kept_BTK is None else {"sampler/kept_tokens": float((kept_BTK[mask_BT] >= 0).sum(axis=-1).mean())}
    length_B = mask_BT.sum(axis=1)
    score_B = np.asarray(scores.score_B)[scores.scorable_B]
    finite = {name: np.asarray(part)[np.isfinite(part)] for name, part in scores.parts.items()}
    return {
        "score/mean": float(score_B.mean()) if len(score_B) else float("nan"),
        "score/std": float(score_B.std()) if len(score_B) else float("nan"),
        **{f"score/{name}": float(part.mean()) for name, part in finite.items() if len(part)},
        "reward/unscorable": float(np.sum(~np.asarray(scores.scorable_B))),
        "response/length_mean": float(length_B.mean()),
        "response/length_max": float(length_B.max()),
        "response/truncated_fraction": float(np.mean(rollout.truncated_B)),
        "tokens/generated": float(mask_BT.sum()),
        **kept,
        **{name: float(value) for name, value in _of_tokens(logp_BT, ref_logp_BT, gap_to_BT, mask_BT).items()},
    }


def flat_groups(advantage_BT: Array, prompt_id_B: np.ndarray) -> Metrics:
    """Return the share of groups whose advantages are all 0, as a metric."""
    moved_B = np.asarray(np.any(advantage_BT, axis=1))
    flat = [not moved_B[prompt_id_B == prompt].any() for prompt in np.unique(prompt_id_B)]
    return {"group/flat_fraction": float(np.mean(flat))}


@jax.jit
def _of_tokens(
    logp_BT: Array, ref_logp_BT: Array | None, sampler_logp_BT: Array | None, mask_BT: Array
) -> dict[str, Array]:
    """Compute means over all tokens in one compiled program, which allocates no further array of the batch's size."""
    metrics = {"policy/entropy": masked_mean(-logp_BT, mask_BT)}
    if ref_logp_BT is not None:
        metrics["kl/ref"] = masked_mean(kl_estimate(logp_BT, ref_logp_BT, estimator="k3"), mask_BT)
        per_response_B = masked_mean(kl_estimate(logp_BT, ref_logp_BT, estimator="k1"), mask_BT, axis=1)
        metrics["kl/ref_sequence_mean"] = per_response_B.mean()
    if sampler_logp_BT is not None:
        metrics |= sampler_gap(logp_BT, sampler_logp_BT, mask_BT)
    return metrics
