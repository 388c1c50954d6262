"""Sequences, updates and metrics of preference pairs.

A step computes the log-probabilities or the scores of its pairs and the derivative of the loss by each of these
numbers. One update then uses the derivatives as token weights; see `jaxrlhf.algos.preference`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxrlhf.algos import PairLoss, masked_sum, token_weights
from jaxrlhf.batch import Array, Experience, Pair, Problem, Sequences, images_of_problems
from jaxrlhf.config import Config
from jaxrlhf.dataflows.step import Metrics


class PairRewards(NamedTuple):
    """Loss and rewards of preference pairs.

    Attributes:
      loss: Loss of each pair and its derivatives.
      chosen_P: Reward of the chosen answer: the policy's implicit reward, a score, or minus a cost.
      rejected_P: Reward of the rejected answer.
    """

    loss: PairLoss
    chosen_P: Array
    rejected_P: Array


def pair_sequences(problems: Sequence[Problem], config: Config) -> Sequences:
    """Build two rows per pair: the prompt with the chosen answer, then with the rejected answer.

    The mask marks the positions to read: for a policy, every token of the answers. A critic values the prefix before a
    position, so the score of a whole sequence is read at the position after it, whatever token is there.
    """
    count, after, rollout = 2 * len(problems), config.algorithm.positions_after, config.rollout
    assert after is not None, "the algorithm learns from pairs"
    width = rollout.max_prompt_tokens + rollout.max_response_tokens
    token_BT, mask_BT, length_B = np.zeros((count, width), np.int32), np.zeros((count, width), bool), []
    for index, pair in enumerate(problems):
        assert isinstance(pair, Pair), "the configuration accepts only pairs"
        for row, answer in enumerate((pair.solution_tokens, pair.rejected_tokens), start=2 * index):
            start, end = len(pair.prompt_tokens), len(pair.prompt_tokens) + len(answer)
            token_BT[row, :end] = (*pair.prompt_tokens, *answer)
            mask_BT[row, end if after else start : end + after] = True
            length_B.append(end + after)
    prompt_id_B = np.repeat(np.array([problem.prompt_id for problem in problems], np.int64), 2)
    images_B = images_of_problems([problem for problem in problems for _ in range(2)])
    return Sequences(token_BT, np.array(length_B, np.int32), mask_BT, prompt_id_B, images_B=images_B)


def mismatched(problems: Sequence[Problem], config: Config) -> Sequences:
    """Build prompts followed by the two answers to the previous prompt of the batch.

    Prompts and answers have separate length limits, so the answers fit.
    """
    pairs = [problem for problem in problems if isinstance(problem, Pair)]
    moved = [
        replace(pair, solution_tokens=other.solution_tokens, rejected_tokens=other.rejected_tokens)
        for pair, other in zip(pairs, [*pairs[-1:], *pairs[:-1]], strict=True)
    ]
    return pair_sequences(moved, config)


def pair_sums(value_BT: Array, sequences: Sequences) -> np.ndarray:
    """Return `[P, 2]` sums over the masked tokens of the chosen and of the rejected answer."""
    return np.asarray(masked_sum(value_BT, sequences.mask_BT, axis=1)).reshape(-1, 2)


def pair_experience(sequences: Sequences, loss: PairLoss) -> Experience:
    """Build the update on the mean loss over pairs; `router_weight` averages the router's balance loss over tokens."""
    slope_PA = np.stack([np.asarray(loss.chosen_P), np.asarray(loss.rejected_P)], axis=1)
    weight_B = (slope_PA / len(slope_PA)).reshape(-1).astype(np.float32)
    weight_BT = np.where(sequences.mask_BT, weight_B[:, None], np.float32(0))
    each_BT = np.asarray(token_weights(sequences.mask_BT, sequences.prompt_id_B, aggregation="token-mean"))
    return Experience(sequences, weight_BT, {"router_weight": each_BT})


def pair_metrics(rewards: PairRewards) -> Metrics:
    """Return loss, accuracy, margin and rewards of pairs; a pair of equal rewards counts as half right."""
    margin_P = np.asarray(rewards.chosen_P - rewards.rejected_P)
    return {
        "preference/loss": float(np.mean(rewards.loss.loss_P)),
        "preference/accuracy": float(np.mean((margin_P > 0) + 0.5 * (margin_P == 0))),
        "preference/margin": float(margin_P.mean()),
        "preference/chosen_reward": float(np.mean(rewards.chosen_P)),
        "preference/rejected_reward": float(np.mean(rewards.rejected_P)),
    }


def held_out_metrics(rewards: PairRewards) -> Metrics:
    """Return metrics of held-out pairs; `eval/accuracy` is the share of pairs ranked as labeled."""
    metrics = pair_metrics(rewards)
    ranked = {f"eval/{name}": metrics[f"preference/{name}"] for name in ("accuracy", "loss", "margin")}
    return {**ranked, "eval/problems": float(len(np.asarray(rewards.chosen_P)))}
