"""Reward models and cost models, trained on preference pairs, and process reward models, trained on labeled steps."""

from collections.abc import Sequence

import numpy as np

from jaxrlhf import algos
from jaxrlhf.batch import Array, Experience, Pair, Problem, Sequences
from jaxrlhf.config import Config, CostModel, ProcessRewardModel, RewardModel
from jaxrlhf.data.labelled.steps import LabelledSteps
from jaxrlhf.dataflows.batches.preference_pairs import (
    PairRewards,
    held_out_metrics,
    pair_experience,
    pair_metrics,
    pair_sequences,
    pair_sums,
)
from jaxrlhf.dataflows.step import Metrics, Roles, StepInput, StepResult, call, merged, value_of


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


def learn_steps(roles: Roles, work: StepInput[ProcessRewardModel], problems: Sequence[Problem]) -> StepResult:
    """Make one update of a process reward model, on the mean loss over all labeled steps."""
    batch = step_experience(problems, work.config)
    critic = roles.critic.update_critic([batch], objective=algos.step_objective, settings=None)
    return StepResult(merged(critic))


def evaluate_steps(roles: Roles, config: Config, problems: Sequence[Problem]) -> Metrics:
    """Judge the steps of held-out solutions; `eval/accuracy` is the share of steps judged as labeled."""
    batch = step_experience(problems, config)
    value_BT, mask_BT = value_of(roles.critic.compute_values(batch.sequences)), batch.sequences.mask_BT
    judged = algos.step_objective(value_BT, mask_BT, batch.weight_BT, batch.fields, None).metrics
    means = {name: float(np.asarray(own_BT)[mask_BT].mean()) for name, own_BT in judged.items()}
    return {
        "eval/accuracy": means["steps/accuracy"],
        "eval/loss": means["steps/loss"],
        "eval/problems": float(len(problems)),
    }


def step_experience(problems: Sequence[Problem], config: Config) -> Experience:
    """Build prompts followed by their solutions; the mask marks the position after each step, with any token in it.

    A critic values the prefix before a position, so the value there judges the step.
    """
    count, width = len(problems), config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    token_BT, length_B = np.zeros((count, width), np.int32), np.zeros(count, np.int32)
    mask_BT, label_BT = np.zeros((count, width), bool), np.zeros((count, width), np.float32)
    for row, problem in enumerate(problems):
        assert isinstance(problem, LabelledSteps), "the configuration lets no other problems through"
        start, end = len(problem.prompt_tokens), len(problem.prompt_tokens) + len(problem.solution_tokens)
        token_BT[row, :end] = (*problem.prompt_tokens, *problem.solution_tokens)
        places = start + np.array(problem.step_ends)
        mask_BT[row, places], label_BT[row, places], length_B[row] = True, problem.step_labels, end + 1
    prompt_id_B = np.array([problem.prompt_id for problem in problems], np.int64)
    weight_BT = mask_BT.astype(np.float32) / mask_BT.sum()
    return Experience(Sequences(token_BT, length_B, mask_BT, prompt_id_B), weight_BT, {"label": label_BT})
