"""PRIME: which prompts are trained on, and what rewards tokens."""

import math
from dataclasses import replace

import numpy as np
import pytest
from made_steps import Made, done, rollout_of
from tiny_runs import get_config, training

from jaxrlhf.batch import Scores
from jaxrlhf.config import PRIME, FromScratch, KLInReward, Rollout
from jaxrlhf.dataflows.grpo import Returns
from jaxrlhf.dataflows.prime import in_band, pair_accuracy, process_advantage
from jaxrlhf.models import from_scratch
from jaxrlhf.planner.problem import roles_of

WIDTH = 6
PLAIN = PRIME(responses_per_update=8, process_reward=training())


class Process:
    """A process reward model and a reference that say made-up things of each token, by the row's number."""

    def __init__(self, ratio_BT: np.ndarray) -> None:
        self.ratio_BT = ratio_BT
        self.minibatches: list = []

    def compute_ref_log_prob(self, rollout):
        return done(np.full(rollout.sequences.mask_BT.shape, -2.0, np.float32))

    def compute_log_prob(self, rollout):
        order = np.asarray(rollout.sequences.token_BT[:, 0])
        return done((self.ratio_BT[order] - 2.0).astype(np.float32))

    def update_process_reward(self, minibatches, *, objective, settings):
        self.minibatches += minibatches
        return done({"process_reward/loss": 0.0})


def a_step(settings: PRIME, scores: dict[int, list[float]], *, lengths=(2, 3, 4, 5), more=(), prompts=2):
    """One step with four responses to each prompt, whose scores are given by the prompt."""
    ratio_BT = np.random.default_rng(3).normal(size=(4 * len(scores), WIDTH)).astype(np.float32)
    process = Process(ratio_BT)

    def generate(problems, copies):
        mask_BT = np.arange(WIDTH)[None] < np.array(lengths * len(problems))[:, None]
        return rollout_of(mask_BT, np.repeat([one.prompt_id for one in problems], copies))

    def score(rollout):
        ids = np.asarray(rollout.sequences.prompt_id_B)
        return [scores[int(one)][row % 4] for row, one in enumerate(ids)]

    made = Made(generate, score, other_roles={"process_reward": process, "reference": process})
    result, _ = made.step(settings, prompts=prompts, copies=4, more=more)
    return made, process, result


def test_the_band_is_of_the_share_of_right_responses_among_those_that_have_a_score():
    score = {1: [1, 0, 0, 0, 0], 2: [1, 1, 1, 1, 0], 3: [1, 1, 1, 1, 1], 4: [0.5, 0, 0, 0, 0], 5: [1, 0, 0, 9, 9]}
    ids = np.repeat([2**40 + key for key in score], 5)
    flat = np.array([value for row in score.values() for value in row], np.float32)
    scorable = flat < 9  # of the last, two have none: one of three is right
    teaches = in_band(PLAIN, Scores(flat, scorable, {}), ids)
    assert teaches.reshape(5, 5).all(axis=1).tolist() == [True, True, False, False, True]
    assert teaches.reshape(5, 5).any(axis=1).tolist() == [True, True, False, False, True]
    narrow = replace(PLAIN, least_accuracy=0.3, most_accuracy=0.5)
    assert in_band(narrow, Scores(flat, scorable, {}), ids).reshape(5, 5)[:, 0].tolist() == [False] * 4 + [True]


def test_prompts_outside_the_band_are_replaced_and_train_neither_model():
    scores = {0: [1, 1, 1, 1], 1: [1, 0, 0, 0], 2: [0, 0, 0, 0], 3: [0, 0, 0, 0]}
    made, process, result = a_step(replace(PLAIN, max_rounds=2), scores, more=[2, 3])
    assert [ids for ids, _, _ in made.asked] == [(0, 1), (2, 3)]
    for minibatches in (made.minibatches, process.minibatches):
        (batch,) = minibatches
        trained = batch.sequences.prompt_id_B[np.asarray(batch.sequences.mask_BT).any(axis=1)]
        assert set(trained.tolist()) == {1}
        assert np.asarray(batch.weight_BT).sum() == pytest.approx(1)
    assert (result.metrics["group/kept"], result.metrics["group/generated"]) == (1, 4)
    assert result.metrics["group/flat_fraction"] == 0.75
    assert made.collected.problems[0].prompt_id == 1


def test_where_no_prompt_is_in_the_band_the_step_says_so():
    with pytest.raises(ValueError, match=r"^none of 2 prompts got responses with a share of 0.2 to 0.8 correct"):
        a_step(replace(PLAIN, max_rounds=1), {0: [1, 1, 1, 1], 1: [0, 0, 0, 0]})


@pytest.mark.parametrize("weight, gamma", [(1.0, 1.0), (0.3, 0.5)])
def test_advantages_are_of_outcomes_and_of_token_rewards_together(weight, gamma):
    settings = replace(PLAIN, process_weight=weight, gamma=gamma, kl=None)
    scores = {0: [1, 0, 0, 1], 1: [0, 1, 0, 0]}
    made, process, result = a_step(settings, scores)
    lengths, ratio = [2, 3, 4, 5] * 2, process.ratio_BT
    largest = max(abs(ratio[row][token:length].sum()) for row, length in enumerate(lengths) for token in range(length))
    returns = []
    for row, length in enumerate(lengths):
        group = range(row // 4 * 4, row // 4 * 4 + 4)
        outcome = scores[row // 4][row % 4] - np.mean([scores[row // 4][j % 4] for j in group if j != row])
        means = sum(weight * ratio[j][: lengths[j]].mean() / largest for j in group)
        relative = (4 * weight * ratio[row][:length] / largest - means) / 3
        returns.append([outcome + sum(gamma ** (s - t) * relative[s] for s in range(t, length)) for t in range(length)])
    flat = np.concatenate(returns)
    got = made.rows("advantage")[made.rows("mask")]
    np.testing.assert_allclose(got, (flat - flat.mean()) / flat.std(ddof=1), atol=1e-4)
    (batch,) = process.minibatches
    order = np.argsort(batch.sequences.token_BT[:, 0])
    mask = np.asarray(batch.sequences.mask_BT)
    right = [1, 0, 0, 1, 0, 1, 0, 0]
    np.testing.assert_array_equal(batch.fields["outcome"][order], np.array(right)[:, None] * mask[order])
    np.testing.assert_allclose(batch.weight_BT.sum(axis=1), 1 / 8, rtol=1e-6)
    sums = np.array([ratio[row][:length].sum() for row, length in enumerate(lengths)])
    assert result.metrics["process/accuracy"] == pytest.approx(by_pairs(sums, right))
    assert result.metrics["process/log_ratio"] == pytest.approx(np.abs(sums).mean(), rel=1e-5)


def test_an_outcome_is_what_was_paid_in_all_whenever_that_was():
    mask, known, group = np.ones((4, 5), bool), np.ones(4, bool), np.zeros(4, int)
    ratio = np.random.default_rng(0).normal(size=mask.shape).astype(np.float32)
    found = []
    for place in (1, 4):  # by an environment, for its first turn or for its last
        reward = np.zeros(mask.shape, np.float32)
        reward[[0, 3], place] = 1.0
        found.append(process_advantage(PLAIN, ratio, mask, Returns(reward, mask, known, group)))
    np.testing.assert_array_equal(*found)


def by_pairs(sums, right) -> float:
    pairs = [(i, j) for g in (0, 4) for i in range(g, g + 4) for j in range(g, g + 4) if right[i] > right[j]]
    return float(np.mean([sums[i] > sums[j] for i, j in pairs]))


def test_the_accuracy_of_pairs_counts_equals_as_half_and_none_as_unknown():
    ids = np.array([0, 0, 0, 1, 1])
    assert pair_accuracy(np.array([1.0, 1.0, 0.0, 5.0, 6.0]), np.array([True, False, False, False, False]), ids) == 0.75
    assert math.isnan(pair_accuracy(np.ones(5), np.ones(5, bool), ids))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"least_accuracy": 0.9}, "PRIME.least_accuracy=0.9 is above most_accuracy=0.8"),
        ({"beta": 0.0}, "PRIME.beta must be above 0"),
        ({"process_weight": -1.0}, "PRIME.process_weight must be 0 or more"),
        ({"most_accuracy": 1.5}, "PRIME.most_accuracy must be in"),
        ({"max_rounds": 0}, "PRIME.max_rounds must be above 0"),
        ({"kl": KLInReward()}, r"PRIME requires rewards at the last token only, but kl=KLInReward\(.* use KLInLoss"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PRIME(**settings)


def test_its_second_model_is_planned_as_a_trained_language_model():
    config = replace(get_config(), algorithm=PLAIN, rollout=Rollout(responses_per_prompt=4), devices=None)
    found = {role.name: role for role in roles_of(config, lambda _: from_scratch(FromScratch(), tokens=64))}
    assert [(name, role.head, role.trained) for name, role in found.items()] == [
        ("actor", "lm", True),
        ("process_reward", "lm", True),
        ("reference", "lm", False),
    ]
