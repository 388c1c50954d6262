"""Importance weights in the minibatches of a step, without a model."""

import math
from dataclasses import replace

import numpy as np
import pytest
from tiny_runs import get_config

from jaxrlhf.algos import rollout_correction
from jaxrlhf.algos.losses import PolicyTokens, clipped_policy_loss
from jaxrlhf.batch import RolloutBatch, Sequences
from jaxrlhf.config import GRPO, IcePop, PolicyLoss, Rejection, TruncatedImportance
from jaxrlhf.dataflows.batches.minibatches import policy_minibatches, shuffle_groups
from jaxrlhf.dataflows.step import StepInput

_RESPONSES, _TOKENS = 16, 4


def minibatches(*, trainer=True, **settings):
    """One minibatch of a step; in row 2 the trainer finds token 1 exp(0.5) times as likely as the sampler did."""
    config = replace(get_config(), algorithm=GRPO(responses_per_update=_RESPONSES, **settings))
    mask_BT = np.ones((_RESPONSES, _TOKENS), bool)
    length_B, prompt_B = np.full(_RESPONSES, _TOKENS, np.int32), np.arange(_RESPONSES) // 2
    sequences = Sequences(np.arange(_RESPONSES * _TOKENS).reshape(mask_BT.shape), length_B, mask_BT, prompt_B)
    sampler_BT = np.full(mask_BT.shape, -1.0, np.float32)
    old_BT = sampler_BT.copy()
    old_BT[2, 1] += 0.5
    rollout = RolloutBatch(sequences, sampler_BT, np.zeros(_RESPONSES, bool), np.zeros(mask_BT.shape, np.int32))
    [batch], metrics = policy_minibatches(
        StepInput(config, (), 0, {"kl_coefficient": 0.0}),
        sequences,
        rollout,
        advantage_BT=np.ones(mask_BT.shape, np.float32),
        old_logp_BT=old_BT if trainer else None,
        ref_logp_BT=None,
    )
    order = np.argsort(batch.sequences.token_BT[:, 0])
    tokens = mask_BT.sum()
    fields = {name: np.asarray(value)[order] for name, value in batch.fields.items()}
    return np.asarray(batch.weight_BT)[order] * tokens, fields, metrics, old_BT, sampler_BT


def test_rows_are_shuffled_by_prompt_and_responses_of_one_prompt_stay_together():
    prompt_B = np.array([7, 3, 3, 9, 7, 3, 9, 9, 7, 5])
    orders = [shuffle_groups(prompt_B, np.random.default_rng(seed)) for seed in range(200)]
    for order in orders:
        assert sorted(order) == list(range(10))
        assert 1 + np.count_nonzero(np.diff(prompt_B[order])) == 4, "each prompt is one run of rows"
    first = np.bincount([order[0] for order in orders], minlength=10) / 200
    of_prompts = [first[prompt_B == prompt].sum() for prompt in (3, 5, 7, 9)]
    np.testing.assert_allclose(of_prompts, 0.25, atol=0.1)
    assert (first > 0.03).all(), "each row of a prompt may be its first"


@pytest.mark.parametrize(
    "settings, at, row",
    [
        ({}, 1.0, 1.0),
        ({"correction": TruncatedImportance(cap=1.25)}, 1.25, 1.0),
        ({"correction": TruncatedImportance(level="sequence")}, math.exp(0.5), math.exp(0.5)),
        ({"correction": IcePop(high=1.5)}, 0.0, 1.0),
        ({"rejection": (Rejection("k1", "token", high=0.4),)}, 0.0, 1.0),
        ({"rejection": (Rejection("k1", "sequence-sum", high=0.4),)}, 0.0, 0.0),
        ({"correction": IcePop(), "rejection": (Rejection("k3", "token", high=0.1),)}, 0.0, 1.0),
    ],
    ids=str,
)
def test_weights_are_multiplied_and_denominators_stay(settings, at, row):
    weight, fields, metrics, old, _ = minibatches(**settings)
    wanted = np.ones(weight.shape)
    wanted[2], wanted[2, 1] = row, at
    np.testing.assert_allclose(weight, wanted, rtol=1e-6)
    np.testing.assert_array_equal(fields["old_logp"], old)
    assert bool(metrics) == bool(settings)
    if metrics:
        assert metrics["correction/weight_mean"] == pytest.approx(wanted.mean())
        assert metrics["correction/rejected_tokens"] == pytest.approx(np.mean(wanted == 0))


def test_bypass_takes_the_sampler_for_the_old_policy_in_the_ratio_too():
    weight, fields, metrics, _, sampler = minibatches(old_logp="bypass", trainer=False)
    np.testing.assert_array_equal(fields["old_logp"], sampler)
    assert "sampler_logp" not in fields and not metrics
    np.testing.assert_allclose(weight, 1, rtol=1e-6)


def test_bypass_still_rejects_by_what_the_trainer_says():
    rejection = (Rejection("k1", "token", high=0.4),)
    weight, fields, metrics, _, sampler = minibatches(old_logp="bypass", rejection=rejection)
    np.testing.assert_array_equal(fields["old_logp"], sampler)
    assert [tuple(place) for place in np.argwhere(weight == 0)] == [(2, 1)]
    assert metrics["correction/rejected_tokens"] == pytest.approx(1 / weight.size)


def test_a_correction_makes_the_clipped_loss_decoupled_ppos():
    """Hilton et al. 2021, eq. 2, with the weight of the behaviour policy held at a cap."""
    rng, cap, clip = np.random.default_rng(0), 1.5, 0.2
    logp, old, sampler, advantage = rng.normal(scale=0.5, size=(4, 6, 5)).astype(np.float32)
    mask = rng.random((6, 5)) < 0.8
    settings = PolicyLoss(clip_low=clip, clip_high=clip, dual_clip=None)
    weight = rollout_correction(old, sampler, mask, importance=TruncatedImportance(cap=cap)).weight_BT
    loss = clipped_policy_loss(PolicyTokens(logp, old, advantage), settings).loss
    wanted = 0.0
    for b, t in np.argwhere(mask):
        ratio = math.exp(logp[b, t] - old[b, t])
        clipped = min(max(ratio, 1 - clip), 1 + clip)
        behaviour = min(math.exp(old[b, t] - sampler[b, t]), cap)
        wanted -= behaviour * min(ratio * advantage[b, t], clipped * advantage[b, t])
    assert float((weight * loss).sum()) == pytest.approx(wanted, rel=1e-5)
