"""DPO and related losses: a policy learns from preference pairs without a reward model."""

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
    """Make one update of DPO, IPO, RPO, KTO, SimPO, CPO or ORPO."""
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
    """Rank held-out pairs by the policy's implicit rewards; KTO's loss is measured with a reference point of 0."""
    settings = config.algorithm
    assert isinstance(settings, Preference)
    return held_out_metrics(_implicit_rewards(roles, settings, pair_sequences(problems, config), 0.0))


def _distance(roles: Roles, settings: Preference, elsewhere: Sequences) -> float:
    """Return KTO's reference point: the mean log-ratio of answers paired with other prompts, at least 0."""
    logp, ref_logp = _log_probs(roles, settings, elsewhere)
    ratio_PA = call(lambda ours, theirs: pair_sums(np.subtract(ours, theirs), elsewhere), logp, ref_logp)
    return max(float(np.mean(ratio_PA)), 0.0)


def _implicit_rewards(roles: Roles, settings: Preference, sequences: Sequences, distance: float) -> PairRewards:
    logp, ref_logp = _log_probs(roles, settings, sequences)
    return call(implicit_rewards, settings, sequences, logp, ref_logp, distance)


def _log_probs(roles: Roles, settings: Preference, sequences: Sequences) -> tuple[Any, Any]:
    """Return the log-probabilities under the policy and under the reference; None for the latter if there is none."""
    logp = roles.actor.compute_log_prob(sequences, temperature=1.0)
    if isinstance(settings, ReferenceFree):
        return logp, None
    return logp, roles.reference.compute_ref_log_prob(sequences, temperature=1.0)


def implicit_rewards(
    settings: Preference, sequences: Sequences, logp_BT: Array, ref_logp_BT: Array | None, distance: float = 0.0
) -> PairRewards:
    """Compute the loss and the implicit rewards of pairs from log-probabilities, relative to the reference if any.

    Args:
      distance: KTO's reference point, in nats.
    """
    assert isinstance(settings, DPO | IPO | KTO | SimPO | CPO | ORPO), "only pairwise algorithms have a loss of pairs"
    assert (ref_logp_BT is None) == isinstance(settings, ReferenceFree)
    logp_PA, tokens_PA = pair_sums(logp_BT, sequences), np.asarray(sequences.mask_BT).sum(axis=1).reshape(-1, 2)
    ratio_PA = logp_PA if ref_logp_BT is None else logp_PA - pair_sums(ref_logp_BT, sequences)
    chosen_P, rejected_P = ratio_PA.T
    # CPO and ORPO average the likelihood over all tokens of the update, as supervised training does; RPO per answer.
    mean_tokens_P = np.full(len(logp_PA), tokens_PA[:, 0].mean())
    loss: PairLoss
    match settings:
        case IPO():
            loss = algos.ipo(chosen_P, rejected_P, beta=settings.beta)
        case KTO():
            weights = settings.desirable_weight, settings.undesirable_weight
            loss = algos.kto(chosen_P, rejected_P, distance, beta=settings.beta, weights=weights)
        case DPO() | CPO():
            loss = algos.dpo(chosen_P, rejected_P, beta=settings.beta, label_smoothing=settings.label_smoothing)
            if isinstance(settings, RPO | CPO):
                tokens_P = mean_tokens_P if isinstance(settings, CPO) else tokens_PA[:, 0]
                loss = algos.with_likelihood(loss, logp_PA[:, 0], tokens_P, coefficient=settings.nll_coefficient)
        case SimPO():
            loss = algos.simpo(chosen_P, rejected_P, tokens_PA, beta=settings.beta, margin=settings.margin)
        case ORPO():
            loss = algos.odds_ratio(chosen_P, rejected_P, tokens_PA, coefficient=settings.odds_coefficient)
            loss = algos.with_likelihood(loss, chosen_P, mean_tokens_P, coefficient=1.0)
    by_token = isinstance(settings, SimPO | ORPO)
    said_PA = logp_PA / np.maximum(tokens_PA, 1) if by_token else ratio_PA
    beta = 1.0 if isinstance(settings, ORPO) else settings.beta
    return PairRewards(loss, *(beta * said_PA).T)
