"""Algorithms in files that differ from GRPO in the advantage: MaxRL, GDPO, OTB, Clip-Cov, KL-Cov."""

import math
import statistics
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from made_steps import Made, done, episode_records, episodes_of, rollout_of

from jaxrlhf import algos, models
from jaxrlhf.algos.objectives import TokenOutput
from jaxrlhf.batch import Scores
from jaxrlhf.config import (
    Arithmetic,
    ArithmeticReward,
    Config,
    FormatReward,
    FromScratch,
    KLInReward,
    Mixture,
    Refusal,
    Rewards,
    Rollout,
    Source,
    Tools,
    checked,
    load_module,
)
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import StepInput
from jaxrlhf.models.config import ModelConfig
from tests.algos.test_group_baselines import (
    CLOSE,
    GOLDEN,
    GRPO_ADVANTAGE,
    INPUTS,
    PROMPT,
    given,
    group_batch,
    members,
)
from tests.algos.test_group_baselines import (
    MASK as RECORDED,
)

maxrl, gdpo, otb, clip_cov, kl_cov = map(load_module, ("maxrl", "gdpo", "otb", "clip_cov", "kl_cov"))
MASK = np.arange(5) < np.array([3, 2, 4, 1, 2, 5])[:, None]


def config(algorithm, **changes) -> Config:
    settings = {"data": Arithmetic(), "rollout": Rollout(2, 3, max_prompt_tokens=4, max_response_tokens=6), **changes}
    return checked(Config(name="baselines", algorithm=algorithm, steps=1, model=FromScratch(), **settings))


def step(settings: Config, batch):
    """One step of the algorithm on this batch: its result, and the actor that it updated."""
    made = Made(lambda *_: None, lambda *_: None)
    work = StepInput(settings, [], 0, settings.algorithm.initial_state())
    return type(settings.algorithm).learn(SimpleNamespace(actor=made), work, batch), made


# MaxRL.


@pytest.mark.parametrize("seed", range(3))
def test_the_share_of_success_equals_a_loop(seed):
    score, scorable, group = group_batch(seed)
    share = np.zeros(10)
    for i in np.flatnonzero(scorable):
        own = [float(score[j]) for j in members(scorable, group, i)]
        share[i] = (score[i] - statistics.fmean(own)) / (statistics.fmean(own) + 1e-6)
    np.testing.assert_allclose(maxrl.mean_relative(score, scorable, group), share, **CLOSE)
    np.testing.assert_array_equal(maxrl.mean_relative(np.full(10, np.float32(0.1)), scorable, group), 0)


def test_maxrl_refuses_scores_below_zero():
    scores = Scores(np.float32([1, 0, -0.5, 0, 1, 1]), np.ones(6, bool), {})
    batch = ScoredRollout([], rollout_of(MASK, [0, 0, 0, 1, 1, 1]), scores)
    with pytest.raises(Refusal, match=r"MaxRL divides by the mean score .* has the score -0\.5"):
        step(config(maxrl.MaxRL(responses_per_update=6)), batch)
    with pytest.raises(Refusal, match=r"MaxRL divides by the mean score .*KLInReward"):
        maxrl.MaxRL(kl=KLInReward())


# GDPO.


def test_rewards_are_normalised_one_by_one_and_their_sum_over_the_batch():
    first, scorable, group = group_batch(1)
    second = np.where(scorable, np.random.default_rng(2).integers(0, 2, 10), math.nan).astype(np.float32)
    total = np.zeros(10)
    for weight, part in ((0.5, first), (2.0, second)):
        for i in np.flatnonzero(scorable):
            own = [float(part[j]) for j in members(scorable, group, i)]
            if len(set(own)) > 1:
                total[i] += weight * (part[i] - statistics.fmean(own)) / (statistics.stdev(own) + 1e-6)
    wanted = np.where(scorable, (total - total[scorable].mean()) / total[scorable].std(ddof=1), 0)
    found = gdpo.decoupled(np.stack([first, second]), np.array([0.5, 2.0]), scorable, group)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_gdpo_tells_responses_of_one_total_apart():
    parts = {"format": np.float32([1, 0, 0, 1, 1, 0]), "arithmetic": np.float32([0, 1, 0, 0, 1, 1])}
    rewards = Rewards(parts=(ArithmeticReward(), FormatReward(weight=0.5)))
    score = parts["arithmetic"] + 0.5 * parts["format"]
    rollout = rollout_of(MASK, [0, 0, 0, 1, 1, 1])
    batch = ScoredRollout([], rollout, Scores(score, np.ones(6, bool), parts))
    _, made = step(config(gdpo.GDPO(responses_per_update=6), rewards=rewards), batch)

    def normalised(own):
        return [(x - statistics.fmean(own)) / (statistics.stdev(own) + 1e-6) for x in own]

    each = {name: normalised(part[:3].tolist()) + normalised(part[3:].tolist()) for name, part in parts.items()}
    total = np.array(each["arithmetic"]) + 0.5 * np.array(each["format"])
    wanted = (total - total.mean()) / total.std(ddof=1)
    np.testing.assert_allclose(made.rows("advantage"), np.where(MASK, wanted[:, None], 0), rtol=1e-4, atol=1e-5)


def test_gdpo_counts_no_reward_of_an_episode_whose_truncation_scores_0():
    parts = {"format": np.float32([1, 0, 0, 1, 1, 0]), "environment": np.float32([0, 1, 0, 0, 1, 1])}
    cut = np.array([False, True, False, False, False, True])
    tools = Tools(functions=("jaxrlhf.episode:Reply",), truncated="zero")
    algorithm = gdpo.GDPO(responses_per_update=6)
    settings = config(algorithm, rewards=Rewards(parts=(FormatReward(),)), environment=tools)
    found = []
    for ended, own in ((cut, parts), (cut & False, {name: np.where(cut, 0, part) for name, part in parts.items()})):
        record_B = episode_records(*("turns" if one else "done" for one in ended))
        scores = Scores(np.where(cut, 0, sum(parts.values())), np.ones(6, bool), own)
        episodes = episodes_of(np.where(MASK, 0, -1), np.zeros(MASK.shape), record_B=record_B)
        batch = ScoredRollout([], replace(rollout_of(MASK, [0, 0, 0, 1, 1, 1]), episodes=episodes), scores)
        found.append(step(settings, batch)[1].rows("advantage"))
    np.testing.assert_array_equal(*found)


def test_gdpo_refuses_one_reward_and_rewards_of_sources():
    two = Rewards(parts=(ArithmeticReward(), FormatReward()))
    with pytest.raises(Refusal, match="a weight other than 0, got 1"):
        config(gdpo.GDPO(responses_per_update=6), rewards=Rewards(parts=(ArithmeticReward(), FormatReward(weight=0))))
    sources = (
        Source(name="own", data=Arithmetic(), rewards=(ArithmeticReward(),)),
        Source(name="other", data=Arithmetic()),
    )
    with pytest.raises(Refusal, match="sources own have their own rewards"):
        config(gdpo.GDPO(responses_per_update=6), rewards=two, data=Mixture(sources))
    with pytest.raises(Refusal, match=r"KLInReward.* penalizes every token"):
        config(gdpo.GDPO(responses_per_update=6, kl=KLInReward()), rewards=two)


# The optimal token baseline.


def test_the_optimal_token_baseline_counts_tokens_over_turns_as_recorded():
    energy = 1 - 2 * np.exp(given("old_logp")) + np.asarray(GOLDEN["sum_pi_squared"])
    found = otb.optimal_token_baseline(given("reward"), energy, RECORDED, PROMPT)
    np.testing.assert_allclose(found, GOLDEN["group/optimal_token_baseline"], **CLOSE)
    assert found[2, 6] == 0, "no other response of the group has a seventh token"
    alone = otb.optimal_token_baseline(given("reward"), energy, RECORDED, np.arange(6))
    np.testing.assert_array_equal(alone, 0)


def test_the_energy_of_a_token_is_the_squared_norm_of_a_gradient_by_the_logits():
    model = ModelConfig("qwen2", 13, 32, 32, 1, 4, 4, 8, tie_embeddings=True)
    rng = np.random.default_rng(0)
    params = {"embed": rng.normal(size=(16, 32)).astype(np.float32)}  # three rows pad the table
    hidden, token = rng.normal(size=(2, 9, 32)).astype(np.float32), rng.integers(0, 13, (2, 9), dtype=np.int32)
    logp, sharp = (models.token_logp(params, model, hidden, token, temperature=t).logp for t in (0.7, 0.35))
    found = otb.gradient_energy(logp, sharp)
    for row, t in np.ndindex(2, 9):
        if t == 0:
            continue
        logit = (hidden[row, t - 1] @ params["embed"][:13].T / 0.7).astype(np.float64)
        p = np.exp(logit - logit.max()) / np.exp(logit - logit.max()).sum()
        np.testing.assert_allclose(found[row, t], ((np.eye(13)[token[row, t]] - p) ** 2).sum(), rtol=1e-4, atol=1e-6)


def test_a_step_reads_the_policy_at_half_the_temperature():
    asked = []

    class Actor(Made):
        def compute_log_prob(self, rollout, *, temperature=None):
            asked.append(temperature)
            return done(np.where(rollout.sequences.mask_BT, -1.5, np.nan).astype(np.float32))

    scores = Scores(np.float32([1, 0, 0, 0, 1, 1]), np.ones(6, bool), {})
    rollout = rollout_of(MASK, [0, 0, 0, 1, 1, 1])
    settings = config(otb.OptimalTokenBaseline(responses_per_update=6))
    made = Actor(lambda *_: None, lambda *_: None)
    work = StepInput(settings, [], 0, settings.algorithm.initial_state())
    otb.learn(SimpleNamespace(actor=made), work, ScoredRollout([], rollout, scores))
    assert asked == [0.5]
    energy = np.where(MASK, 1 - 2 * np.exp(-1.0) + np.exp(-2.0 + 1.5), 0)  # the sampler's log-probability is -1
    reward = np.zeros(MASK.shape, np.float32)
    reward[np.arange(6), MASK.sum(axis=1) - 1] = scores.score_B
    wanted = otb.optimal_token_baseline(reward, energy, MASK, np.array([0, 0, 0, 1, 1, 1]))
    np.testing.assert_allclose(made.rows("advantage"), wanted, rtol=1e-5, atol=1e-6)


# Clip-Cov and KL-Cov.


def test_clip_cov_leaves_out_tokens_of_a_covariance_in_the_range():
    rng = np.random.default_rng(3)
    advantage, logp, mask = rng.normal(size=(20, 30)), -rng.exponential(size=(20, 30)), rng.random((20, 30)) < 0.7
    settings = clip_cov.ClipCov(share=0.02, covariance_low=0.5, covariance_high=2.0)
    chosen = clip_cov.sampled_in_range(advantage, logp, mask, np.random.default_rng(0), settings)
    mean = advantage[mask].mean(), logp[mask].mean()
    cov = (advantage - mean[0]) * (logp - mean[1])
    assert chosen.sum() == int(0.02 * mask.sum())
    assert (mask & (cov > 0.5) & (cov < 2.0))[chosen].all()
    other = clip_cov.sampled_in_range(advantage, logp, mask, np.random.default_rng(1), settings)
    assert (chosen != other).any(), "the choice is sampled"
    nothing = np.zeros_like(mask)
    assert not clip_cov.sampled_in_range(advantage, logp, nothing, np.random.default_rng(0), settings).any()
    with pytest.raises(Refusal, match="must be below covariance_high"):
        clip_cov.ClipCov(covariance_low=5.0)


def test_a_step_of_clip_cov_trains_on_all_other_tokens_as_grpo_does():
    rng = np.random.default_rng(0)
    mask = rng.random((6, 40)) < 0.8
    logp = np.where(mask, -rng.exponential(size=mask.shape), 0).astype(np.float32)
    scores = Scores(np.float32([1, 0, 0, 0, 1, 1]), np.ones(6, bool), {})
    rollout = replace(rollout_of(mask, [0, 0, 0, 1, 1, 1]), sampler_logp_BT=logp)
    batch = ScoredRollout([], rollout, scores)
    settings = config(clip_cov.ClipCov(responses_per_update=6, share=0.05, covariance_low=0.1))
    result, made = step(settings, batch)
    own = algos.group_relative(scores.score_B, scores.scorable_B, np.array([0, 0, 0, 1, 1, 1]), normalize_std=True)
    whole = np.where(mask, np.asarray(own)[:, None], 0)
    left_out = (made.rows("advantage") == 0) & mask
    cov = (whole - whole[mask].mean()) * (logp - logp[mask].mean())
    assert left_out.sum() == int(0.05 * mask.sum())
    assert ((cov > 0.1) & (cov < 5))[left_out].all()
    np.testing.assert_allclose(made.rows("advantage"), np.where(left_out, 0, whole), rtol=1e-6)
    np.testing.assert_array_equal(made.rows("mask"), mask)
    assert result.metrics["policy/chosen"] == left_out.sum() / mask.sum()


def test_the_loss_and_the_gradient_of_kl_cov_are_the_recorded_ones():
    settings = kl_cov.KLCov(share=0.2, coefficient=0.5)
    advantage = np.where(RECORDED, GRPO_ADVANTAGE, math.nan).astype(np.float32)
    chosen = kl_cov.largest(GRPO_ADVANTAGE, given("logp", 0.0), RECORDED, share=0.2)
    assert chosen.sum() == int(0.2 * RECORDED.sum())
    fields = {"old_logp": given("old_logp"), "advantage": advantage, "chosen": chosen.astype(np.float32)}
    weight = algos.token_weights(RECORDED, aggregation=settings.policy.aggregation)

    def loss(logp):
        return kl_cov.objective(TokenOutput(logp), RECORDED, weight, fields, settings).loss.sum()

    value, slope = jax.jit(jax.value_and_grad(loss))(given("logp", -math.inf))
    np.testing.assert_allclose(value, GOLDEN["policy/kl_cov/loss"], **CLOSE)
    np.testing.assert_allclose(slope, np.where(RECORDED, GOLDEN["policy/kl_cov/gradient"], 0), **CLOSE)


def test_a_step_of_kl_cov_marks_the_tokens_of_the_largest_covariance():
    scores = Scores(np.float32(INPUTS["score"]), np.ones(6, bool), {})
    rollout = replace(rollout_of(RECORDED, PROMPT), sampler_logp_BT=given("logp", 0.0))
    _, made = step(config(kl_cov.KLCov(responses_per_update=6, share=0.2)), ScoredRollout([], rollout, scores))
    own = algos.group_relative(scores.score_B, scores.scorable_B, PROMPT, normalize_std=True)
    cov = clip_cov.token_covariance(algos.to_tokens(own, RECORDED), given("logp", 0.0), RECORDED)
    wanted = np.zeros(RECORDED.size, bool)
    wanted[np.argsort(-cov.ravel(), kind="stable")[: int(0.2 * RECORDED.sum())]] = True
    np.testing.assert_array_equal(made.rows("chosen") > 0, wanted.reshape(RECORDED.shape))
