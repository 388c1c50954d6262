"""Reward models and cost models, trained on preference pairs."""

from collections.abc import Sequence

import numpy as np

from jaxrlhf import algos
from jaxrlhf.algos import AnswerSums, PairRewards, PairSettings, answer_sums
from jaxrlhf.batch import Array, Pair, Problem, Sequences
from jaxrlhf.config import Config, CostModel, RewardModel
from jaxrlhf.dataflows.batches.preference_pairs import (
    answer_numbers,
    held_out_metrics,
    pair_experience,
    pair_sequences,
)
from jaxrlhf.dataflows.step import Metrics, Roles, StepInput, StepResult, call, merged


def learn(roles: Roles, work: StepInput[RewardModel], pairs: Sequence[Problem]) -> StepResult:
    """Make one update of a reward model or a cost model."""
    sequences = pair_sequences(pairs, work.config)
    batch = pair_experience(sequences, loss_fields(work.settings, pairs, sequences))
    how = PairSettings(pair_rewards, work.settings, len(pairs))
    return StepResult(merged(roles.critic.update_critic([batch], objective=algos.pair_objective, settings=how)))


def evaluate(roles: Roles, config: Config, problems: Sequence[Problem]) -> Metrics:
    """Rank held-out pairs by the model's scores."""
    sequences, settings = pair_sequences(problems, config), config.algorithm
    assert isinstance(settings, RewardModel)
    return held_out_metrics(call(judged, settings, problems, sequences, roles.critic.compute_values(sequences)))


def judged(settings: RewardModel, pairs: Sequence[Problem], sequences: Sequences, value_BT: Array) -> PairRewards:
    """Compute losses and rewards of pairs from the values of their tokens."""
    fields = loss_fields(settings, pairs, sequences) | {"answer": answer_numbers(sequences)}
    sums = answer_sums(np.asarray(value_BT), np.asarray(sequences.mask_BT), fields, pairs=len(pairs))
    return pair_rewards(settings, sums)


def loss_fields(settings: RewardModel, pairs: Sequence[Problem], sequences: Sequences) -> dict[str, np.ndarray]:
    """Return the field that `pair_rewards` reads: `safe`, 1 for harmless answers, of a cost model, else `margin`."""
    labelled = [problem for problem in pairs if isinstance(problem, Pair)]
    if isinstance(settings, CostModel):
        name, of_answers = "safe", np.array([pair.safe for pair in labelled], np.float32).ravel()
    else:
        name, of_answers = "margin", np.repeat(np.array([pair.margin for pair in labelled], np.float32), 2)
    return {name: np.where(sequences.mask_BT, of_answers[:, None], np.float32(0))}


def pair_rewards(settings: RewardModel, sums: AnswerSums) -> PairRewards:
    """Compute losses and rewards of pairs from the score of each answer, which is read at one token.

    Args:
      sums: Scores of the answers, and `loss_fields`.
    """
    chosen_P, rejected_P = sums["value"][:, 0], sums["value"][:, 1]
    if isinstance(settings, CostModel):
        safe_PA = sums["safe"] > 0
        cost_P = algos.pair_cost(chosen_P, rejected_P, safe_PA[:, 0], safe_PA[:, 1])
        return PairRewards(cost_P, -chosen_P, -rejected_P)
    return PairRewards(algos.bradley_terry(chosen_P, rejected_P, sums["margin"][:, 0]), chosen_P, rejected_P)
