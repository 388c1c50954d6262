"""An episode as one row weighs what it weighs as several."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny_runs

from jaxrlhf.batch import EpisodeRows, Image, RolloutBatch, Sequences
from jaxrlhf.config import GRPO, Rollout, load
from jaxrlhf.dataflows.batches.episode_rows import Apart, side_by_side
from jaxrlhf.dataflows.batches.minibatches import minibatches
from jaxrlhf.dataflows.step import StepInput

EPISODES = [[(3, 2)], [(2, 3), (4, 1)], [(1, 4)], [(5, 2), (2, 2), (3, 3)]]
"""Tokens before and of the policy's turn, of every sequence of four episodes."""


def rollout_of(episodes, width=9):
    rows = [(number, *sequence) for number, sequences in enumerate(episodes) for sequence in sequences]
    count = len(rows)
    token_BT, turn_BT = np.zeros((count, width), np.int32), np.full((count, width), -1, np.int16)
    length_B, episode_B = np.zeros(count, np.int32), np.array([row[0] for row in rows])
    for row, (_, before, drawn) in enumerate(rows):
        length_B[row] = before + drawn
        token_BT[row, : before + drawn] = 10 * row + np.arange(1, before + drawn + 1)
        turn_BT[row, before : before + drawn] = row
    mask_BT = turn_BT >= 0
    sequences = Sequences(token_BT, length_B, mask_BT, episode_B // 2)
    information = EpisodeRows(episode_B + 100, turn_BT, mask_BT.astype(np.float32), turn_BT.astype(np.int64))
    return RolloutBatch(
        sequences, mask_BT * np.float32(-1), episode_B == 1, np.zeros(mask_BT.shape, np.int32), information
    )


def test_rows_side_by_side_come_apart_as_they_were():
    rollout = rollout_of(EPISODES)
    images_B = np.empty(len(rollout.truncated_B), object)
    for row in range(len(images_B)):
        images_B[row] = (Image("here", str(row), (1, 2, 2), 0, 1),) * (row % 3)
    rollout = replace(rollout, sequences=replace(rollout.sequences, images_B=images_B))
    value_BT = np.random.default_rng(0).normal(size=rollout.sequences.token_BT.shape)
    whole, joined = side_by_side(rollout, (value_BT,))
    assert joined.shape == (4, 27)
    assert whole.sequences.mask_BT.sum(axis=1).tolist() == [2, 4, 4, 7]
    assert whole.truncated_B.tolist() == [False, True, False, False]
    apart = Apart(whole.sequences)
    for given, found in zip(
        jax.tree.leaves((rollout.sequences, value_BT)),
        jax.tree.leaves((apart.sequences, apart.array(joined))),
        strict=True,
    ):
        np.testing.assert_array_equal(given, found)
    assert apart.rows(np.array([3, 1])).tolist() == [4, 5, 6, 1, 2]


def test_episodes_of_one_sequence_are_left_as_they_are():
    rollout = rollout_of([[(3, 2)], [(2, 3)]])
    value_BT = np.zeros((2, 9))
    whole, same = side_by_side(rollout, (value_BT,))
    assert whole is rollout and same is value_BT


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"])
def test_an_episode_weighs_the_same_in_one_row_and_in_several(aggregation):
    """The turns of an episode in one long sequence, and in a sequence each: the same tokens have the same weights."""
    several = rollout_of(EPISODES)
    together = rollout_of([[(1, sum(drawn for _, drawn in sequences))] for sequences in EPISODES])
    config = replace(
        load("grpo_arithmetic"),
        algorithm=GRPO(responses_per_update=2, kl=None),
        rollout=Rollout(prompts_per_step=2, responses_per_prompt=2, max_response_tokens=20),
    )
    work = StepInput(config, [], 0, {"kl_coefficient": 0.0})
    weights = []
    for rollout in (several, together):
        (whole,) = side_by_side(rollout, ())
        batches = minibatches(work, whole.sequences, {}, aggregation=aggregation)
        assert len(batches) == 2
        weights.append([np.sort(batch.weight_BT[batch.weight_BT > 0]) for batch in batches])
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_sequences_of_an_episode_are_in_one_minibatch():
    config = tiny_runs.get_config()
    settings = replace(config.algorithm, responses_per_update=2)
    rollout = rollout_of(EPISODES)
    (whole,) = side_by_side(rollout, ())
    work = StepInput(
        replace(config, algorithm=settings, rollout=replace(config.rollout, prompts_per_step=2)), [], 3, {}
    )
    batches = minibatches(work, whole.sequences, {}, aggregation="token-mean")
    tokens = [batch.sequences.token_BT for batch in batches]
    rows = [set((token_BT[token_BT > 0] // 10).tolist()) for token_BT in tokens]
    episodes = [{0}, {1, 2}, {3}, {4, 5, 6}]
    for batch in rows:
        assert all(one <= batch or not one & batch for one in episodes)
    assert set.union(*rows) == set(range(7))
