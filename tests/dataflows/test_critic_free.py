"""Algorithms without a critic: their estimates against loops, and their steps against recorded vectors."""

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from made_steps import Made, episodes_of, rollout_of

from jaxrlhf import algos
from jaxrlhf.config import (
    GPG,
    GRPO,
    OPO,
    RLOO,
    DrGRPO,
    KLInReward,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    Training,
)
from jaxrlhf.dataflows import grpo
from jaxrlhf.dataflows.grpo import Returns

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "vectors.json").read_text())
MASK = np.asarray(VECTORS["inputs"]["mask"]) == 1
SCORE = VECTORS["inputs"]["score"]
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def group_batch(seed):
    """Rows of groups of 4, 3 (equal scores), 2 and 1, shuffled; some unscorable; ids beyond 32 bits."""
    rng = np.random.default_rng(seed)
    label = rng.permutation([0, 0, 0, 0, 1, 1, 1, 2, 2, 3])
    scorable = rng.random(10) < 0.85
    score = np.where(scorable, np.where(label == 1, 0.1, rng.normal(size=10)), math.nan).astype(np.float32)
    return score, scorable, (label.astype(np.int64) << 32) + 7, rng.integers(1, 9, 10)


def siblings(scorable, group, row):
    return [int(j) for j in np.flatnonzero(scorable & (group == group[row]))]


# Estimates, over rows in any order.


@pytest.mark.parametrize("seed", range(4))
def test_the_length_weighted_baseline_equals_a_loop(seed):
    score, scorable, group, length = group_batch(seed)
    wanted = np.zeros(10)
    for i in np.flatnonzero(scorable):
        rows = siblings(scorable, group, i)
        wanted[i] = score[i] - sum(length[j] * score[j] for j in rows) / sum(length[j] for j in rows)
    np.testing.assert_allclose(algos.length_weighted(score, scorable, group, length), wanted, **CLOSE)


@pytest.mark.parametrize("seed", range(4))
def test_the_group_policy_gradient_equals_a_loop(seed):
    score, scorable, group, _ = group_batch(seed)
    centred, teaches = np.zeros(10), 0
    for i in np.flatnonzero(scorable):
        scores = [float(score[j]) for j in siblings(scorable, group, i)]
        centred[i] = score[i] - statistics.fmean(scores)
        teaches += len(set(scores)) > 1
    wanted = centred * scorable.sum() / teaches
    np.testing.assert_allclose(algos.group_policy_gradient(score, scorable, group), wanted, **CLOSE)


@pytest.mark.parametrize("seed", range(4))
def test_spread_is_that_of_the_scorable_scores_of_a_group(seed):
    score, scorable, group, _ = group_batch(seed)
    wanted = [len({float(score[j]) for j in siblings(scorable, group, i)}) > 1 for i in range(10)]
    assert np.asarray(algos.has_spread(score, scorable, group)).tolist() == wanted


def test_returns_relative_to_the_greedy_score_equal_a_loop():
    rng = np.random.default_rng(0)
    mask = rng.random((4, 6)) < 0.6
    mask[1] = False
    reward, baseline = rng.normal(size=(4, 6)).astype(np.float32), rng.normal(size=4).astype(np.float32)
    wanted = np.zeros((4, 6))
    for b, t in np.argwhere(mask):
        wanted[b, t] = sum(reward[b, s] for s in range(t, 6) if mask[b, s]) - baseline[b]
    poisoned = np.where(mask, reward, np.nan).astype(np.float32)
    np.testing.assert_allclose(algos.greedy_relative(poisoned, baseline, mask), wanted, **CLOSE)


def test_groups_of_one_equal_scores_and_batches_without_scores_give_exactly_zero():
    group = np.repeat([1, 2, 3, 4], [1, 3, 7, 1])
    score = np.repeat(np.float32([0.3, 0.1, -1e6 / 3, 0.0]), [1, 3, 7, 1])
    length = np.arange(1, 13)
    for scorable in (np.ones(12, bool), np.zeros(12, bool)):
        for found in (
            algos.length_weighted(score, scorable, group, length),
            algos.group_policy_gradient(score, scorable, group),
            algos.has_spread(score, scorable, group),
        ):
            np.testing.assert_array_equal(found, 0)


# Whole steps, on the responses of the recorded vectors.

ALGORITHMS = {
    "group/grpo": GRPO(responses_per_update=6),
    "group/dr_grpo": DrGRPO(responses_per_update=6),
    "group/rloo": RLOO(responses_per_update=6, kl=None),
    "group/opo": OPO(responses_per_update=6),
    "group/whitened": ReinforcePlusPlusBaseline(responses_per_update=6, kl=None),
    "group/remax": ReMax(responses_per_update=6, kl=None),
    "returns/whitened": ReinforcePlusPlus(responses_per_update=6, kl=None, gamma=0.9),
}


def recorded(score=SCORE) -> Made:
    """The recorded responses, or one greedy response to each prompt; the latter's scores are the recorded ones."""
    greedy = [VECTORS["inputs"]["greedy_score"][row] for row in (0, 3)]

    def generate(problems, copies):
        mask_BT = MASK if copies == 3 else MASK[[0, 3]]
        return rollout_of(mask_BT, np.repeat([one.prompt_id for one in problems], copies))

    return Made(generate, lambda rollout: score if len(rollout.truncated_B) == 6 else greedy)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_trains_on_the_recorded_advantages(name):
    made = recorded()
    made.step(ALGORITHMS[name], prompts=2, copies=3)
    wanted = np.where(MASK, np.asarray(VECTORS["expected"][name]), 0)
    np.testing.assert_allclose(made.rows("advantage"), wanted, rtol=3e-5, atol=3e-6)
    np.testing.assert_array_equal(made.rows("mask"), MASK)
    np.testing.assert_allclose(made.rows("weight")[MASK].sum(), MASK.sum() / 6 / 512 if "dr_" in name else 1, rtol=1e-5)


def test_a_step_of_gpg_weighs_the_groups_that_teach():
    made = recorded(score=[1, 0, 0.5, 1, 1, 1])
    result, _ = made.step(GPG(responses_per_update=6), prompts=2, copies=3)
    wanted = 2 * np.asarray([0.5, -0.5, 0, 0, 0, 0])[:, None] * MASK
    np.testing.assert_allclose(made.rows("advantage"), wanted, **CLOSE)
    assert result.metrics["group/flat_fraction"] == 0.5


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_unscorable_response_trains_nothing_and_is_in_no_baseline(name):
    whole, algorithm = recorded(score=[1, math.nan, 0, 0, math.nan, 1]), ALGORITHMS[name]
    result, _ = whole.step(algorithm, prompts=2, copies=3)
    assert result.metrics["reward/unscorable"] == 2
    assert not whole.rows("mask")[[1, 4]].any()
    assert not whole.rows("advantage")[[1, 4]].any()
    assert np.isfinite(whole.rows("advantage")).all()
    kept = [0, 2, 3, 5]
    alone = Made(
        lambda problems, copies: rollout_of(MASK[kept if copies == 2 else [0, 3]], np.repeat([0, 1], copies)),
        lambda rollout: [1, 0, 0, 1] if len(rollout.truncated_B) == 4 else [0.4, 0.9],
    )
    alone.step(type(algorithm)(**{**vars(algorithm), "responses_per_update": 4}), prompts=2, copies=2)
    np.testing.assert_allclose(whole.rows("advantage")[kept], alone.rows("advantage"), **CLOSE)


def test_the_greedy_baseline_is_asked_for_once_and_an_unscorable_one_teaches_nothing():
    made = recorded()
    result, _ = made.step(ReMax(responses_per_update=6, kl=None), prompts=2, copies=3)
    assert [(ids, sampling.greedy, copies) for ids, sampling, copies in made.asked] == [
        ((0, 1), False, 3),
        ((0, 1), True, 1),
    ]
    assert result.metrics["score/greedy"] == pytest.approx(0.65)
    assert result.metrics["tokens/generated"] == MASK.sum() + MASK[[0, 3]].sum()
    assert len(made.collected.rollout.result().truncated_B) == 6

    half = recorded()
    half.score = lambda rollout: SCORE if len(rollout.truncated_B) == 6 else [0.4, math.nan]
    half.step(ReMax(responses_per_update=6, kl=None), prompts=2, copies=3)
    np.testing.assert_array_equal(half.rows("advantage")[:3], made.rows("advantage")[:3])
    assert not half.rows("advantage")[3:].any()


def names(algorithm) -> list[str]:
    return [role.name for role in algorithm.roles(Training())]


def test_without_a_kl_there_is_no_reference_and_nothing_is_said_of_it():
    for algorithm in ALGORITHMS.values():
        assert names(algorithm) == ["actor", "reward"]
        result, _ = recorded().step(algorithm, prompts=2, copies=3)
        assert not {"kl/ref", "kl/ref_sequence_mean"} & result.metrics.keys()
    for kind in (RLOO, ReMax, ReinforcePlusPlus):
        assert names(kind()) == ["actor", "reference", "reward"]
    assert isinstance(RLOO().kl, KLInReward) and RLOO().kl.estimator == "k1"


@pytest.mark.parametrize("algorithm", [GRPO, DrGRPO, RLOO, OPO, GPG, ReinforcePlusPlusBaseline])
def test_a_group_of_one_is_refused_by_what_compares_groups(algorithm):
    with pytest.raises(ValueError, match=f"^{algorithm.__name__} compares the responses to one prompt: .* got 1"):
        recorded().step(algorithm(responses_per_update=2), prompts=2, copies=1)


def test_those_that_compare_with_something_else_take_a_group_of_one():
    made = Made(lambda problems, copies: rollout_of(MASK[[0, 3]], [0, 1]), lambda rollout: [1.0, 0.0])
    made.step(ReinforcePlusPlus(responses_per_update=2, kl=None), prompts=2, copies=1)
    white = made.rows("advantage")[MASK[[0, 3]]]
    np.testing.assert_allclose([white.mean(), white.std(ddof=1)], [0, 1], atol=1e-5)


@dataclass(frozen=True)
class Own(ReinforcePlusPlus):
    """With an advantage of one's own."""

    advantage: Callable[[Returns], Any] = lambda returns: returns.score_B
    learn = staticmethod(lambda roles, work, batch: grpo.learn(roles, work, batch, work.settings.advantage))


@pytest.mark.parametrize(
    ("advantage", "given"),
    [
        (lambda of: np.ones(1), r"has shape \(1,\) and dtype float64, all finite"),
        (lambda of: of.score_B[:1], r"has shape \(1,\) and dtype float32"),
        (lambda of: 1.0, r"has shape \(\)"),
        (lambda of: of.score_B[:, None], r"has shape \(2, 1\)"),
        (lambda of: of.score_B * np.nan, r"has shape \(2,\) and dtype float32, not all finite numbers"),
        (lambda of: "high", r"has shape \(\) and dtype <U4, not all finite numbers"),
    ],
)
def test_an_advantage_that_is_none_is_refused(advantage, given):
    made = Made(lambda problems, copies: rollout_of(MASK[[0, 3]], [0, 1]), lambda rollout: [1.0, 0.0])
    tokens = MASK.shape[1]
    with pytest.raises(ValueError, match=f"the advantage of Own {given}.* each of 2 responses.* their {tokens} tok"):
        made.step(Own(responses_per_update=2, kl=None, advantage=advantage), prompts=2, copies=1)


@pytest.mark.parametrize("advantage", [lambda of: jnp.ones(2, jnp.bfloat16), lambda of: np.ones_like(of.mask_BT, int)])
def test_an_advantage_may_be_of_responses_or_tokens_and_of_any_numbers(advantage):
    made = Made(lambda problems, copies: rollout_of(MASK[[0, 3]], [0, 1]), lambda rollout: [1.0, 0.0])
    made.step(Own(responses_per_update=2, kl=None, advantage=advantage), prompts=2, copies=1)
    np.testing.assert_array_equal(made.rows("advantage")[MASK[[0, 3]]], 1)


def test_episodes_that_were_paid_the_same_in_other_parts_teach_nothing():
    # Added up in their order, as float32, the parts of a row are 22.4 or the number beside it.
    paid = np.float32([[7.8, 4.8, 2.6, 7.2], [2.6, 7.8, 7.2, 4.8], [2.6, 7.2, 7.8, 4.8], [7.2, 7.8, 4.8, 2.6]])
    mask, turn = np.ones((4, 4), bool), np.tile(np.arange(4, dtype=np.int16), (4, 1))
    turns = episodes_of(turn, paid)

    def generate(problems, copies):
        return replace(rollout_of(mask, [0, 0, 0, 0]), episodes=turns)

    made = Made(generate, lambda rollout: [22.4] * 4)
    result, _ = made.step(GRPO(responses_per_update=4), prompts=1, copies=4)
    assert not made.rows("advantage").any() and result.metrics["group/flat_fraction"] == 1
