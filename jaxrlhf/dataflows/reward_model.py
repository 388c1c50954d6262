"""Reward models and cost models, trained on preference pairs."""

from collections.abc import Sequence

import numpy as np

from jaxrlhf import algos
from jaxrlhf.batch import Array, Pair, Problem, Sequences
from jaxrlhf.config import Config, CostModel, RewardModel
from jaxrlhf.dataflows.batches.preference_pairs import (
    PairRewards,
    held_out_metrics,
    pair_experience,
    pair_metrics,
    pair_sequences,
    pair_sums,
)
from jaxrlhf.dataflows.step import Metrics, Roles, StepInput, StepResult, call, merged


def learn(roles: Roles, work: StepInput[RewardModel], pairs: Sequence[Problem]) -> StepResult:
    """Make one update of a reward model or a cost model."""
    sequences = pair_sequences(pairs, work.config)
    values = roles.critic.compute_values(sequences)
    rewards = call(pair_rewards, work.settings, pairs, sequences, values)
    batch = pair_experience(sequences, rewards.loss)
    critic = roles.critic.update_critic([batch], objective=algos.linear_objective, settings=None)
    return StepResult(merged(pair_metrics(rewards), critic))


def evaluate(roles: Roles, config: Config, problems: Sequence[Problem]) -> Metrics:
    """Rank held-out pairs by the model's scores."""
    sequences = pair_sequences(problems, config)
    values = roles.critic.compute_values(sequences)
    return held_out_metrics(call(pair_rewards, config.algorithm, problems, sequences, values))


def pair_rewards(
    settings: RewardModel, problems: Sequence[Problem], sequences: Sequences, value_BT: Array
) -> PairRewards:
    """Compute the loss and the rewards of pairs from the score of each answer."""
    chosen_P, rejected_P = pair_sums(value_BT, sequences).T
    pairs = [problem for problem in problems if isinstance(problem, Pair)]
    if isinstance(settings, CostModel):
        safe_PA = np.array([pair.safe for pair in pairs])
        return PairRewards(algos.pair_cost(chosen_P, rejected_P, safe_PA[:, 0], safe_PA[:, 1]), -chosen_P, -rejected_P)
    margin_P = np.array([pair.margin for pair in pairs], np.float32)
    return PairRewards(algos.bradley_terry(chosen_P, rejected_P, margin_P), chosen_P, rejected_P)
