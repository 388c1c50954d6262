"""An episode as one row weighs what it weighs as several."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tiny_runs
from made_steps import done, episode_records, problem

from jaxrlhf.batch import EpisodeRows, Image, RolloutBatch, Scores, Sequences
from jaxrlhf.batching.ragged import MinibatchRows, RaggedBatch
from jaxrlhf.config import (
    DAPO,
    GRPO,
    PPO,
    PRIME,
    VAPO,
    Distillation,
    FormatReward,
    Rewards,
    Rollout,
    SafeRLHF,
    Tools,
    function_of,
    load,
)
from jaxrlhf.dataflows.batches.episode_rows import side_by_side
from jaxrlhf.dataflows.batches.minibatches import minibatches
from jaxrlhf.dataflows.step import StepInput, value_of
from jaxrlhf.trainer.evaluation import evaluate

EPISODES = [[(3, 2)], [(2, 3), (4, 1)], [(1, 4)], [(5, 2), (2, 2), (3, 3)]]
"""Tokens before and of the policy's turn, of every sequence of four episodes."""


def rollout_of(episodes, width=9):
    rows = [(number, *sequence) for number, sequences in enumerate(episodes) for sequence in sequences]
    count = len(rows)
    token_BT, turn_BT = np.zeros((count, width), np.int32), np.full((count, width), -1, np.int16)
    length_B, episode_B = np.zeros(count, np.int32), np.array([row[0] for row in rows])
    for row, (_, before, sampled) in enumerate(rows):
        length_B[row] = before + sampled
        token_BT[row, : before + sampled] = 10 * row + np.arange(1, before + sampled + 1)
        turn_BT[row, before : before + sampled] = row
    mask_BT = turn_BT >= 0
    sequences = Sequences(token_BT, length_B, mask_BT, episode_B // 2)
    record_B = episode_records(*("turns" if episode == 1 else "done" for episode in episode_B))
    paid_BT = mask_BT.astype(np.float32)
    information = EpisodeRows(episode_B + 100, turn_BT, paid_BT, turn_BT.astype(np.int64), record_B)
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
    rows, apart = (
        RaggedBatch.of(own, value=value) for own, value in ((rollout.sequences, value_BT), (whole.sequences, joined))
    )
    jax.tree.map(np.testing.assert_array_equal, rows, apart)
    chosen, weights = [np.array([3, 1])], [joined[[3, 1]]]
    (own,) = MinibatchRows.of(whole.sequences, {}, chosen, weights, coefficients={})
    expected = np.where(np.arange(9) < rollout.sequences.length_B[:, None], value_BT, 0)[[4, 5, 6, 1, 2]]
    np.testing.assert_array_equal(own.weight_BT, expected)


def test_episodes_of_one_sequence_are_left_as_they_are():
    rollout = rollout_of([[(3, 2)], [(2, 3)]])
    value_BT = np.zeros((2, 9))
    whole, same = side_by_side(rollout, (value_BT,))
    assert whole is rollout and same is value_BT


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"])
def test_an_episode_weighs_the_same_in_one_row_and_in_several(aggregation):
    """The turns of an episode in one long sequence, and in a sequence each: the same tokens have the same weights."""
    several = rollout_of(EPISODES)
    together = rollout_of([[(1, sum(sampled for _, sampled in sequences))] for sequences in EPISODES])
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


class Played:
    """Every role of a step on four episodes; the limit of turns ended the second; all scores differ."""

    def __init__(self, rollout):
        self._rollout, self.updates = rollout, []

    def generate_sequences(self, problems, sampling, **_):
        return done(self._rollout)

    def compute_reward(self, problems, rollout):
        score = np.float32([1, 0, 0.25, 2])
        return done(Scores(score, np.ones(4, bool), {"format": score, "format_2": score}))

    def compute_values(self, rollout):
        return done(np.zeros(rollout.sequences.mask_BT.shape, np.float32))

    def compute_log_prob(self, rollout):
        return done(rollout.sampler_logp_BT)

    compute_ref_log_prob = compute_log_prob

    def update_actor(self, minibatches, **_):
        self.updates.append(list(minibatches))
        return done({})

    update_critic = update_process_reward = update_actor

    def step(self, algorithm, **environment):
        critics = {"critic": tiny_runs.training()} if isinstance(algorithm, PPO) else {}
        config = replace(
            tiny_runs.get_config(),
            algorithm=replace(algorithm, responses_per_update=4, **critics),
            rollout=Rollout(prompts_per_step=2, responses_per_prompt=2, max_response_tokens=8),
            environment=Tools(functions=("jaxrlhf.episode:Reply",), **environment),
            rewards=Rewards(parts=(FormatReward(), FormatReward(weight=0.0))),
        )
        work = StepInput(config, [problem(0), problem(1)], 0, config.algorithm.initial_state(), list)
        names = ("actor", "critic", "cost_critic", "reference", "reward", "process_reward")
        roles = SimpleNamespace(**dict.fromkeys(names, self))
        batch = function_of(config.algorithm, "collect")(roles, work)
        result = function_of(config.algorithm, "learn")(roles, work, batch)
        return value_of(batch.scores), result.with_updates().metrics

    def trained(self):
        """Episodes that each update trains on, by the tens of their token ids."""
        tokens = [
            np.concatenate([one.sequences.token_BT[one.sequences.mask_BT] for one in own]) for own in self.updates
        ]
        return [set((token // 10).tolist()) for token in tokens]


@pytest.mark.parametrize(
    "algorithm",
    [
        GRPO(),
        PPO(),
        VAPO(critic_warmup_steps=0),
        SafeRLHF(kl=None, cost_critic=tiny_runs.training()),
        Distillation(),
        DAPO(overlong=None),
        PRIME(success=0.9),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_what_a_limit_ended_is_left_out_of_every_update(algorithm):
    single = rollout_of([[(3, 2)], [(2, 3)], [(1, 4)], [(5, 2)]])
    for truncated, wanted in (("score", {0, 1, 2, 3}), ("leave_out", {0, 2, 3})):
        made = Played(single)
        _, metrics = made.step(algorithm, truncated=truncated)
        assert made.trained() and all(rows == wanted for rows in made.trained())
        assert metrics["episode/ended_turns"] == 0.25  # of groups that were sampled, too


@pytest.mark.parametrize(
    "algorithm", [PPO(), PPO(actions="turns"), VAPO(critic_warmup_steps=0), DAPO(mask_truncated=True)]
)
def test_an_episode_of_several_sequences_is_one_row_to_every_algorithm(algorithm):
    """Its sequences side by side, rewards to go among them, and its length and its end those of all."""
    made = Played(rollout_of(EPISODES))
    scores, _ = made.step(algorithm, history="as_templated")
    left_out = {1, 2} if isinstance(algorithm, DAPO) else set()  # rows of the second episode, which was truncated
    assert made.trained() and all(rows == {0, 1, 2, 3, 4, 5, 6} - left_out for rows in made.trained())
    if isinstance(algorithm, DAPO):  # of 8 tokens 2 are the buffer, and the last episode has 7
        np.testing.assert_allclose(scores.score_B, [1, 0, 0.25, 2 - 0.5])
    for own in made.updates:
        for batch in own:
            if "returns" in batch.fields:  # a token is paid 1, and the rest of a score at the episode's end
                rows = {int(token_T[0]) // 10: row for row, token_T in enumerate(batch.sequences.token_BT)}
                returns = [batch.fields["returns"][rows[row]][batch.sequences.mask_BT[rows[row]]] for row in (4, 5, 6)]
                expected = [2, 1, 0, -1, -2, -3, -4] if algorithm.actions == "tokens" else [2, 2, 0, 0, -2, -2, -2]
                np.testing.assert_allclose(np.concatenate(returns), expected, atol=1e-5)


def test_evaluation_counts_episodes_and_not_their_sequences():
    made = Played(rollout_of(EPISODES))
    tools = Tools(functions=("jaxrlhf.episode:Reply",), history="as_templated")
    config = replace(tiny_runs.get_config(), environment=tools)
    roles = SimpleNamespace(actor=made, reward=made)
    metrics, _ = evaluate(roles, config, [problem(number) for number in range(4)], str)
    assert (metrics["eval/length_mean"], metrics["eval/truncated_fraction"]) == (17 / 4, 1 / 4)
