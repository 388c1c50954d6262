"""DPO and related losses: a policy learns from preference pairs without a reward model."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrlhf import algos
from jaxrlhf.algos import AnswerSums, PairRewards, PairSettings, answer_sums
from jaxrlhf.batch import Array, Problem, Sequences
from jaxrlhf.config import CPO, DPO, IPO, KTO, ORPO, RPO, Config, Preference, ReferenceFree, SimPO
from jaxrlhf.dataflows.batches.preference_pairs import (
    answer_numbers,
    held_out_metrics,
    mismatched,
    pair_experience,
    pair_sequences,
)
from jaxrlhf.dataflows.step import Metrics, Roles, StepInput, StepResult, call, merged


def learn(roles: Roles, work: StepInput[Preference], pairs: Sequence[Problem]) -> StepResult:
    """Make one update of DPO, IPO, RPO, KTO, SimPO, CPO or ORPO."""
    settings, sequences, measured = work.settings, pair_sequences(pairs, work.config), Metrics()
    ref_logp = _ref_log_prob(roles, settings, sequences)
    distance = 0.0
    if isinstance(settings, KTO):
        distance = _distance(roles, mismatched(pairs, work.config))
        measured = {"preference/distance": distance}
    batch = pair_experience(sequences, call(loss_fields, settings, sequences, ref_logp, distance))
    how = PairSettings(implicit_rewards, settings, len(pairs))
    actor = roles.actor.update_actor([batch], objective=algos.pair_objective, settings=how, temperature=1.0)
    return StepResult(merged(measured, actor))


def evaluate(roles: Roles, config: Config, problems: Sequence[Problem]) -> Metrics:
    """Rank held-out pairs by the policy's implicit rewards; KTO's loss is measured with a reference point of 0."""
    settings, sequences = config.algorithm, pair_sequences(problems, config)
    assert isinstance(settings, Preference)
    logp = roles.actor.compute_log_prob(sequences, temperature=1.0)
    return held_out_metrics(call(judged, settings, sequences, logp, _ref_log_prob(roles, settings, sequences)))


def judged(settings: Preference, sequences: Sequences, logp_BT: Array, ref_logp_BT: Array | None) -> PairRewards:
    """Compute losses and implicit rewards of pairs from log-probabilities; KTO's reference point is 0."""
    fields = loss_fields(settings, sequences, ref_logp_BT, 0.0) | {"answer": answer_numbers(sequences)}
    sums = answer_sums(np.asarray(logp_BT), np.asarray(sequences.mask_BT), fields, pairs=len(logp_BT) // 2)
    return implicit_rewards(settings, sums)


def _distance(roles: Roles, elsewhere: Sequences) -> float:
    """Return KTO's reference point: the mean log-ratio of answers paired with other prompts, at least 0."""
    logp = roles.actor.compute_log_prob(elsewhere, temperature=1.0)
    ref_logp = roles.reference.compute_ref_log_prob(elsewhere, temperature=1.0)

    def mean_ratio(ours_BT: Array, theirs_BT: Array) -> float:
        ratio_BT = np.where(elsewhere.mask_BT, np.subtract(ours_BT, theirs_BT), 0)
        return float(ratio_BT.sum(axis=1).mean())

    return max(call(mean_ratio, logp, ref_logp), 0.0)


def _ref_log_prob(roles: Roles, settings: Preference, sequences: Sequences) -> Any:
    """Compute the reference's log-probabilities; None if the algorithm has no reference."""
    if isinstance(settings, ReferenceFree):
        return None
    return roles.reference.compute_ref_log_prob(sequences, temperature=1.0)


def loss_fields(
    settings: Preference, sequences: Sequences, ref_logp_BT: Array | None, distance: float
) -> dict[str, np.ndarray]:
    """Return the fields that `implicit_rewards` reads.

    Args:
      ref_logp_BT: Log-probabilities under the reference; None without a reference.
      distance: KTO's reference point, in nats.
    """
    assert (ref_logp_BT is None) == isinstance(settings, ReferenceFree)
    mask_BT = np.asarray(sequences.mask_BT)
    fields = {} if ref_logp_BT is None else {"ref_logp": np.asarray(ref_logp_BT)}
    if isinstance(settings, KTO):
        fields["distance"] = np.full(mask_BT.shape, distance, np.float32)
    if isinstance(settings, CPO | ORPO):
        fields["mean_tokens"] = np.full(mask_BT.shape, mask_BT[::2].sum(axis=1).mean(), np.float32)
    return fields


def implicit_rewards(settings: Preference, sums: AnswerSums) -> PairRewards:
    """Compute losses and implicit rewards of pairs from sums over answers, relative to the reference if any.

    Args:
      sums: Log-probabilities of the answers, and `loss_fields`.
    """
    assert isinstance(settings, DPO | IPO | KTO | SimPO | CPO | ORPO), "only pairwise algorithms have a loss of pairs"
    logp_PA, tokens_PA = sums["value"], sums["tokens"]
    ratio_PA = logp_PA - sums["ref_logp"] if "ref_logp" in sums else logp_PA
    each_PA = 1 / jnp.maximum(tokens_PA, 1)
    chosen_P, rejected_P = ratio_PA[:, 0], ratio_PA[:, 1]
    # CPO and ORPO average the likelihood over all tokens of the update, as supervised training does; RPO per answer.
    averaged_P = (sums["mean_tokens"] * each_PA if "mean_tokens" in sums else tokens_PA)[:, 0]
    nll_P = algos.nll_per_token(logp_PA[:, 0], averaged_P)
    match settings:
        case IPO():
            loss_P = algos.ipo(chosen_P, rejected_P, beta=settings.beta)
        case KTO():
            weights, distance_P = (settings.desirable_weight, settings.undesirable_weight), sums["distance"] * each_PA
            loss_P = algos.kto(chosen_P, rejected_P, distance_P.max(axis=1), beta=settings.beta, weights=weights)
        case DPO() | CPO():
            loss_P = algos.dpo(chosen_P, rejected_P, beta=settings.beta, label_smoothing=settings.label_smoothing)
            if isinstance(settings, RPO | CPO):
                loss_P += settings.nll_coefficient * nll_P
        case SimPO():
            loss_P = algos.simpo(chosen_P, rejected_P, tokens_PA, beta=settings.beta, margin=settings.margin)
        case ORPO():
            loss_P = nll_P + algos.odds_ratio(chosen_P, rejected_P, tokens_PA, coefficient=settings.odds_coefficient)
    reward_PA = logp_PA * each_PA if isinstance(settings, SimPO | ORPO) else ratio_PA
    beta = 1.0 if isinstance(settings, ORPO) else settings.beta
    return PairRewards(loss_P, beta * reward_PA[:, 0], beta * reward_PA[:, 1])
