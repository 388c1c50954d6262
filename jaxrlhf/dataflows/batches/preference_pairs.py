"""Sequences, updates and metrics of preference pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from jaxrlhf.algos import PairRewards, token_weights
from jaxrlhf.batch import Array, Pair, Problem, Sequences, images_of_problems
from jaxrlhf.batching.ragged import Experience
from jaxrlhf.config import Config, Preference
from jaxrlhf.dataflows.step import Metrics


def pair_sequences(problems: Sequence[Problem], config: Config) -> Sequences:
    """Build two rows per pair: the prompt with the chosen answer, then with the rejected answer.

    The mask marks the positions to read: for a policy, every token of the answers. A critic values the prefix before a
    position, so the score of a whole sequence is read at the position after it, whatever token is there.
    """
    after, tokens, masks = config.algorithm.positions_after, list[Sequence[int]](), list[Sequence[bool]]()
    assert after is not None, "the algorithm learns from pairs"
    for pair in problems:
        assert isinstance(pair, Pair), "the configuration accepts only pairs"
        for answer in (pair.solution_tokens, pair.rejected_tokens):
            tokens.append((*pair.prompt_tokens, *answer, *[0] * after))
            start = len(pair.prompt_tokens) + (len(answer) if after else 0)
            masks.append([False] * start + [True] * (len(tokens[-1]) - start))
    twice = [problem for problem in problems for _ in range(2)]
    ids, images_B = [problem.prompt_id for problem in twice], images_of_problems(twice)
    return Sequences.of(tokens, masks, ids, width=config.rollout.width, images_B=images_B)


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
    return Experience.of(sequences, weight_BT, {**of_tokens, **fields}, together=Preference.together)


def held_out_metrics(rewards: PairRewards) -> Metrics:
    """Return metrics of held-out pairs; `eval/accuracy` is the share of pairs ranked as labeled."""
    metrics = {name: float(np.mean(value_P)) for name, value_P in rewards.metrics.items()}
    ranked = {f"eval/{name}": metrics[f"preference/{name}"] for name in ("accuracy", "loss", "margin")}
    return {**ranked, "eval/problems": float(len(rewards.loss_P))}
