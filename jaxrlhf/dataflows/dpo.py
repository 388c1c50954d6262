"""DPO and its kin: a policy learns from preference pairs without a reward model."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrlhf import algos
from jaxrlhf.algos import PairLoss
from jaxrlhf.batch import Array, Problem, Sequences
from jaxrlhf.config import CPO, DPO, IPO, KTO, ORPO, RPO, Config, Preference, ReferenceFree, SimPO
from jaxrlhf.dataflows.batches.preference_pairs import (
    PairRewards,
    held_out_metrics,
    mismatched,
    pair_experience,
    pair_metrics,
    pair_sequences,
    pair_sums,
)
from jaxrlhf.dataflows.step import Metrics, Roles, StepInput, StepResult, call, merged


def learn(roles: Roles, work: StepInput[Preference], pairs: Sequence[Problem]) -> StepResult:
    """One update of DPO, IPO, RPO, KTO, SimPO, CPO or ORPO."""
    settings, sequences = work.settings, pair_sequences(pairs, work.config)
    distance, measured = 0.0, Metrics()
    if isinstance(settings, KTO):
        distance = _distance(roles, settings, mismatched(pairs, work.config))
        measured = {"preference/distance": distance}
    rewards = _implicit_rewards(roles, settings, sequences, distance)
    batch = pair_experience(sequences, rewards.loss)
    actor = roles.actor.update_actor([batch], objective=algos.linear_objective, settings=None, temperature=1.0)
    return StepResult(merged(pair_metrics(rewards), measured, actor))


def evaluate(roles: Roles, config: Config, problems: Sequence[Problem]) -> Metrics:
    """Rank held-out pairs by the policy's implicit rewards; the loss of KTO is from a distance of 0."""
    settings = config.algorithm
    assert isinstance(settings, Preference)
    return held_out_metrics(_implicit_rewards(roles, settings, pair_sequences(problems, config), 0.0))


def _distance(roles: Roles, settings: Preference, elsewhere: Sequences) -> float:
    """Mean log-ratio of answers behind prompts that are not theirs, or 0 if that is higher."""
    logp, ref_logp = _log_probs(roles, settings, elsewhere)
    ratio_PA = call(lambda ours, theirs: pair_sums(np.subtract(ours, theirs), elsewhere), logp, ref_logp)
    return max(float(np.mean(ratio_PA)), 0.0)


def _implicit_rewards(roles: Roles, settings: Preference, sequences: Sequences, distance: float) -> PairRewards:
    logp, ref_logp = _log_probs(roles, settings, sequences)
    return call(implicit_rewards, settings, sequences, logp, ref_logp, distance)


def _log_probs(roles: Roles, settings: Preference, sequences: Sequences) -> tuple[Any, Any]:
    """Log-probabilities by the policy and by the reference, where there is one."""
    logp = roles.actor.compute_log_prob(sequences, temperature=1.0)
    if isinstance(settings, ReferenceFree):
        return logp, None
    return logp, roles.reference.compute_ref_log_prob(sequences, temperature=1.0)


def implicit_rewards(
    settings: Preference, sequences: Sequences, logp_BT: Array, ref_logp_BT: Array | None, distance: float = 0.0
) -> PairRewards:
    """Loss and implicit rewards of pairs: how likely the policy makes each answer, by itself or to the reference.

    Args:
      distance: KTO's point of reference, in nats.
    """
    logp_PA, tokens_PA = pair_sums(logp_BT, sequences), np.asarray(sequences.mask_BT).sum(axis=1).reshape(-1, 2)
    if isinstance(settings, ReferenceFree):
        return _without_reference(settings, logp_PA, tokens_PA)
    assert isinstance(settings, DPO | IPO | KTO) and ref_logp_BT is not None
    chosen_P, rejected_P = (logp_PA - pair_sums(ref_logp_BT, sequences)).T
    loss: PairLoss
    match settings:
        case IPO():
            loss = algos.ipo(chosen_P, rejected_P, beta=settings.beta)
        case KTO():
            weights = settings.desirable_weight, settings.undesirable_weight
            loss = algos.kto(chosen_P, rejected_P, distance, beta=settings.beta, weights=weights)
        case _:
            loss = algos.dpo(chosen_P, rejected_P, beta=settings.beta, label_smoothing=settings.label_smoothing)
    if isinstance(settings, RPO):
        loss = algos.with_likelihood(loss, logp_PA[:, 0], tokens_PA[:, 0], coefficient=settings.nll_coefficient)
    return PairRewards(loss, settings.beta * chosen_P, settings.beta * rejected_P)


def _without_reference(settings: ReferenceFree, logp_PA: np.ndarray, tokens_PA: np.ndarray) -> PairRewards:
    chosen_P, rejected_P = logp_PA.T
    mean_PA = logp_PA / np.maximum(tokens_PA, 1)
    # Likelihoods are per token of the whole update, as in supervised training, and not per answer.
    tokens_P = np.full(len(logp_PA), tokens_PA[:, 0].mean())
    match settings:
        case SimPO():
            loss = algos.simpo(chosen_P, rejected_P, tokens_PA, beta=settings.beta, margin=settings.margin)
            return PairRewards(loss, *(settings.beta * mean_PA).T)
        case CPO():
            loss = algos.dpo(chosen_P, rejected_P, beta=settings.beta, label_smoothing=settings.label_smoothing)
            loss = algos.with_likelihood(loss, chosen_P, tokens_P, coefficient=settings.nll_coefficient)
            return PairRewards(loss, *(settings.beta * logp_PA).T)
        case ORPO():
            loss = algos.odds_ratio(chosen_P, rejected_P, tokens_PA, coefficient=settings.odds_coefficient)
            loss = algos.with_likelihood(loss, chosen_P, tokens_P, coefficient=1.0)
            return PairRewards(loss, *mean_PA.T)
    raise TypeError(f"{type(settings).__name__} has no loss of pairs")
