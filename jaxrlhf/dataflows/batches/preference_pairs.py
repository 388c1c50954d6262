"""Sequences, updates and metrics of preference pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from jaxrlhf.algos import PairRewards, token_weights
from jaxrlhf.batch import Array, Experience, Pair, Problem, Sequences, images_of_problems
from jaxrlhf.config import Config, Preference
from jaxrlhf.dataflows.step import Metrics


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


def answer_numbers(sequences: Sequences) -> np.ndarray:
    """Return `answer_BT`, the numbers of the answers that `answer_sums` reads: row b has answer b + 1."""
    mask_BT = np.asarray(sequences.mask_BT)
    return np.where(mask_BT, np.arange(1, len(mask_BT) + 1, dtype=np.int32)[:, None], np.int32(0))


def pair_experience(sequences: Sequences, fields: Mapping[str, Array]) -> Experience:
    """Build the update on the mean loss over pairs; `router_weight` averages the router's balance loss over tokens.

    Args:
      fields: `[B, T]` arrays that the loss reads, by name.
    """
    mask_BT = np.asarray(sequences.mask_BT)
    tokens_P = mask_BT.sum(axis=1).reshape(-1, 2).sum(axis=1)
    weight_P = 1 / (len(tokens_P) * np.maximum(tokens_P, 1))
    weight_BT = np.where(mask_BT, np.repeat(weight_P, 2)[:, None], 0).astype(np.float32)
    of_tokens = {
        "answer": answer_numbers(sequences),
        "metric_weight": weight_BT * np.float32(tokens_P.sum()),
        "router_weight": np.asarray(token_weights(mask_BT, sequences.prompt_id_B, aggregation="token-mean")),
    }
    return Experience(sequences, weight_BT, {**of_tokens, **fields}, together=Preference.together)


def held_out_metrics(rewards: PairRewards) -> Metrics:
    """Return metrics of held-out pairs; `eval/accuracy` is the share of pairs ranked as labeled."""
    metrics = {name: float(np.mean(value_P)) for name, value_P in rewards.metrics.items()}
    ranked = {f"eval/{name}": metrics[f"preference/{name}"] for name in ("accuracy", "loss", "margin")}
    return {**ranked, "eval/problems": float(len(rewards.loss_P))}
