"""DPO, IPO and RPO: a policy learns from preference pairs without a reward model."""

from collections.abc import Sequence

import numpy as np

from jaxrlhf import algos
from jaxrlhf.batch import Array, Problem, Sequences
from jaxrlhf.config import DPO, IPO, RPO, Config
from jaxrlhf.dataflows.batches.preference_pairs import (
    PairRewards,
    held_out_metrics,
    pair_experience,
    pair_metrics,
    pair_sequences,
    pair_sums,
)
from jaxrlhf.dataflows.step import Metrics, Roles, StepInput, StepResult, call, merged


def learn(roles: Roles, work: StepInput[DPO | IPO], pairs: Sequence[Problem]) -> StepResult:
    """One update of DPO, IPO or RPO."""
    sequences = pair_sequences(pairs, work.config)
    rewards = _implicit_rewards(roles, work.settings, sequences)
    batch = pair_experience(sequences, rewards.loss)
    actor = roles.actor.update_actor([batch], objective=algos.linear_objective, settings=None, temperature=1.0)
    return StepResult(merged(pair_metrics(rewards), actor))


def evaluate(roles: Roles, config: Config, problems: Sequence[Problem]) -> Metrics:
    """Rank held-out pairs by the policy's implicit rewards."""
    settings = config.algorithm
    assert isinstance(settings, DPO | IPO)
    return held_out_metrics(_implicit_rewards(roles, settings, pair_sequences(problems, config)))


def _implicit_rewards(roles: Roles, settings: DPO | IPO, sequences: Sequences) -> PairRewards:
    logp = roles.actor.compute_log_prob(sequences, temperature=1.0)
    ref_logp = roles.reference.compute_ref_log_prob(sequences, temperature=1.0)
    return call(implicit_rewards, settings, sequences, logp, ref_logp)


def implicit_rewards(settings: DPO | IPO, sequences: Sequences, logp_BT: Array, ref_logp_BT: Array) -> PairRewards:
    """Loss and implicit rewards of pairs: how much likelier the policy makes each answer than the reference does."""
    logp_PA = pair_sums(logp_BT, sequences)
    chosen_P, rejected_P = (logp_PA - pair_sums(ref_logp_BT, sequences)).T
    if isinstance(settings, IPO):
        loss = algos.ipo(chosen_P, rejected_P, beta=settings.beta)
    else:
        loss = algos.dpo(chosen_P, rejected_P, beta=settings.beta, label_smoothing=settings.label_smoothing)
    if isinstance(settings, RPO):
        tokens_P = np.asarray(sequences.mask_BT).sum(axis=1)[::2]
        loss = algos.with_likelihood(loss, logp_PA[:, 0], tokens_P, coefficient=settings.nll_coefficient)
    return PairRewards(loss, settings.beta * chosen_P, settings.beta * rejected_P)
