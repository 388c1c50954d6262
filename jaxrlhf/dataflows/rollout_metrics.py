"""Metrics of a rollout: scores, lengths, the distance to the reference, the gap between sampler and trainer."""

import numpy as np

from jaxrlhf.algos import kl_estimate, masked_mean, sampler_gap
from jaxrlhf.batch import Array, RolloutBatch, Scores
from jaxrlhf.dataflows.step import Metrics


def rollout_metrics(
    rollout: RolloutBatch, scores: Scores, old_logp_BT: Array | None, ref_logp_BT: Array | None
) -> Metrics:
    """Metrics of a rollout and its scores.

    Args:
      old_logp_BT: The trainer's log-probabilities; None leaves the gap to the sampler out.
      ref_logp_BT: The reference's log-probabilities; None leaves the divergence from it out.
    """
    logp_BT = rollout.sampler_logp_BT if old_logp_BT is None else old_logp_BT
    mask_BT = np.asarray(rollout.sequences.mask_BT)
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
        **({} if ref_logp_BT is None else _divergence(logp_BT, ref_logp_BT, mask_BT)),
        "policy/entropy": float(masked_mean(-np.asarray(logp_BT), mask_BT)),
        "tokens/generated": float(mask_BT.sum()),
        **({} if old_logp_BT is None else _gaps(old_logp_BT, rollout)),
    }


def _divergence(logp_BT: Array, ref_logp_BT: Array, mask_BT: np.ndarray) -> Metrics:
    k1_BT = np.where(mask_BT, kl_estimate(logp_BT, ref_logp_BT, estimator="k1"), 0.0)
    return {
        "kl/ref": float(masked_mean(kl_estimate(logp_BT, ref_logp_BT, estimator="k3"), mask_BT)),
        "kl/ref_sequence_mean": float(np.mean(k1_BT.sum(axis=1) / np.maximum(mask_BT.sum(axis=1), 1))),
    }


def _gaps(logp_BT: Array, rollout: RolloutBatch) -> Metrics:
    gap = sampler_gap(logp_BT, rollout.sampler_logp_BT, np.asarray(rollout.sequences.mask_BT))
    return {
        "sampler/logp_gap_mean": float(gap.mean),
        "sampler/logp_gap_max": float(gap.max),
        "sampler/probability_error": float(gap.probability_error),
        "sampler/kl": float(gap.kl_sampler_trainer),
        "sampler/kl_reverse": float(gap.kl_trainer_sampler),
        "sampler/effective_fraction": float(gap.effective_fraction),
    }
