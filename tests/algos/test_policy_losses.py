"""The losses of a policy: loops over sequences and tokens as oracles, packed rows, and what must not leak."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf import algos
from jaxrlhf.algos import PolicyTerms, PolicyTokens, TokenOutput
from jaxrlhf.config import GRPO, CISPOLoss, DPPOLoss, DROLoss, GMPOLoss, GSPOLoss, PolicyLoss, RatioLoss, SAPOLoss

_LOSSES = [
    PolicyLoss(clip_low=0.2, clip_high=0.28),
    GSPOLoss(clip_low=0.01, clip_high=0.015),
    CISPOLoss(ratio_low=0.8, ratio_high=1.2),
    SAPOLoss(temperature_positive=1.0, temperature_negative=1.5),
    GMPOLoss(clip_low=0.1, clip_high=0.15),
    DPPOLoss(limit_low=0.02, limit_high=0.03),
    DPPOLoss(divergence="kl", limit_low=1e-3, limit_high=2e-3, ratio_high=1.1),
    DROLoss(beta=0.7),
]
_each_loss = pytest.mark.parametrize("policy", _LOSSES, ids=lambda policy: type(policy).__name__)

# Trained tokens of each sequence, by row; -1 is a token that is not trained on. One row has none at all.
_ROWS = [[[1] * 40, [1], [-1, 1, 1, -1, 1]], [[1, 1, -1, 1] * 8, [-1] * 3, [1] * 9], [[-1] * 12]]
_WIDTH = 50


def packed(poison=0.0, *, seed=0):
    """Rows as above, with padding behind, and `poison` on every token that is not trained on."""
    rng = np.random.default_rng(seed)
    segment, mask = np.zeros((len(_ROWS), _WIDTH), np.int32), np.zeros((len(_ROWS), _WIDTH), bool)
    for row, sequences in enumerate(_ROWS):
        ids = np.concatenate([np.full(len(tokens), n + 1) for n, tokens in enumerate(sequences)])
        segment[row, : len(ids)] = ids
        mask[row, : len(ids)] = np.concatenate(sequences) == 1

    def fill(x):
        return np.where(mask, x, poison).astype(np.float32)

    old = -rng.exponential(size=mask.shape)
    logp = np.minimum(old + 0.1 * rng.normal(size=mask.shape), -1e-3)
    # One sign for each sequence, another size for each token.
    sign = rng.choice([-1.0, 1.0], (len(_ROWS), 4))[np.arange(len(_ROWS))[:, None], segment]
    fields = {
        "old_logp": fill(old),
        "advantage": fill(sign * (0.5 + rng.random(mask.shape))),
        "segment": segment,
    }
    return fill(logp), mask, fill(0.01 + rng.random(mask.shape)), fields


@partial(jax.jit, static_argnums=4)
@partial(jax.value_and_grad, has_aux=True)
def loss_and_gradient(logp, mask, weight, fields, settings):
    objective = algos.policy_objective(TokenOutput(logp), mask, weight, fields, settings)
    return objective.loss.sum(), objective.metrics


def members(mask, segment):
    """The trained tokens of each sequence, as index arrays."""
    for row in range(len(mask)):
        for own in sorted(set(segment[row][mask[row]].tolist())):
            yield row, np.flatnonzero(mask[row] & (segment[row] == own))


def oracle(policy, logp, old, advantage):
    """Loss of each token of one sequence and its derivative by that token's own logp, in plain floats."""
    log_ratio = [max(-20.0, min(20.0, a - b)) for a, b in zip(logp, old, strict=True)]
    if isinstance(policy, GSPOLoss):
        log_ratio = [math.fsum(log_ratio) / len(log_ratio)] * len(log_ratio)
    if isinstance(policy, GMPOLoss):
        bounds = [(-1e9, policy.clip_high) if gain > 0 else (-policy.clip_low, 1e9) for gain in advantage]
        near = [min(max(x, low), high) for x, (low, high) in zip(log_ratio, bounds, strict=True)]
        whole = math.exp(math.fsum(near) / len(near))
        for gain, x, clipped in zip(advantage, log_ratio, near, strict=True):
            yield -gain * whole, -gain * whole if x == clipped else 0.0
        return
    for value, before, gain, x in zip(logp, old, advantage, log_ratio, strict=True):
        ratio = math.exp(x)
        match policy:
            case DPPOLoss():
                q, p = math.exp(value), math.exp(before)
                kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) if max(p, q) < 1 else 0.0
                moved = abs(q - p) if policy.divergence == "tv" else kl
                limit = policy.limit_high if gain > 0 else policy.limit_low
                kept = moved <= limit or (q > p) != (gain > 0)
                weight = min(ratio, policy.ratio_high) * kept
                yield -weight * gain * value, -weight * gain
            case DROLoss():
                yield -gain * value + policy.beta / 2 * x * x, -gain + policy.beta * x
            case CISPOLoss():
                bounded = min(max(ratio, policy.ratio_low), policy.ratio_high)
                yield -bounded * gain * value, -bounded * gain
            case SAPOLoss():
                tau = policy.temperature_positive if gain > 0 else policy.temperature_negative
                soft = 1 / (1 + math.exp(-tau * (ratio - 1)))
                yield -gain * soft * 4 / tau, -gain * ratio * 4 * soft * (1 - soft)
            case _:
                near = min(max(ratio, 1 - policy.clip_low), 1 + policy.clip_high)
                loss = max(-gain * ratio, -gain * near)
                dual = getattr(policy, "dual_clip", None)
                if dual and gain < 0 and loss > -dual * gain:
                    yield -dual * gain, 0.0
                else:
                    yield loss, -gain * ratio if -gain * ratio >= -gain * near else 0.0


@_each_loss
def test_loss_and_gradient_equal_a_loop_over_sequences(policy):
    logp, mask, weight, fields = packed(math.nan)
    (loss, _), gradient = loss_and_gradient(logp, mask, weight, fields, GRPO(policy=policy))
    total, wanted, zeros = 0.0, np.zeros(mask.shape), 0
    for row, at in members(mask, fields["segment"]):
        inputs = [x[row, at].tolist() for x in (logp, fields["old_logp"], fields["advantage"])]
        for t, (value, slope) in zip(at, oracle(policy, *inputs), strict=True):
            total += float(weight[row, t]) * value
            wanted[row, t] = float(weight[row, t]) * slope
            zeros += slope == 0
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-7)
    clips = isinstance(policy, PolicyLoss | GSPOLoss | GMPOLoss | DPPOLoss)
    assert (0 < zeros < mask.sum()) if clips else zeros == 0, "the data no longer has tokens of both kinds"


def test_the_gradient_of_gspo_is_that_of_the_ratio_of_whole_responses():
    logp, mask, _, fields = packed(seed=3)
    old, segment = fields["old_logp"].astype(np.float64), fields["segment"]
    sequences = list(members(mask, segment))
    gain = {(row, at[0]): float(fields["advantage"][row, at[0]]) for row, at in sequences}
    for row, at in sequences:
        fields["advantage"][row, at] = gain[row, at[0]]

    def of_responses(x):
        """The mean over responses of the clipped loss of exp(mean log-ratio), with nothing held constant."""
        total = 0.0
        for row, at in sequences:
            ratio = math.exp((x[row, at] - old[row, at]).mean())
            total += max(-gain[row, at[0]] * ratio, -gain[row, at[0]] * min(max(ratio, 0.99), 1.015))
        return total / len(sequences)

    weight = np.zeros(mask.shape, np.float32)
    for row, at in sequences:
        weight[row, at] = 1 / (len(sequences) * len(at))
    settings = GRPO(policy=GSPOLoss(clip_low=0.01, clip_high=0.015))
    (loss, _), gradient = loss_and_gradient(logp, mask, weight, fields, settings)
    np.testing.assert_allclose(loss, of_responses(logp.astype(np.float64)), rtol=1e-5)
    step = 1e-6
    for row, at in sequences:
        for t in at[:3]:
            moved = [logp.astype(np.float64) for _ in range(2)]
            moved[0][row, t] += step
            moved[1][row, t] -= step
            slope = (of_responses(moved[0]) - of_responses(moved[1])) / (2 * step)
            np.testing.assert_allclose(gradient[row, t], slope, rtol=1e-3, atol=1e-6)
    clipped = [not gradient[row, at[0]] for row, at in sequences]
    assert any(clipped) and not all(clipped), "the data no longer has responses of both kinds"


@_each_loss
def test_at_the_old_policy_every_loss_has_the_plain_policy_gradient(policy):
    _, mask, weight, fields = packed(math.nan)
    (_, metrics), gradient = loss_and_gradient(fields["old_logp"], mask, weight, fields, GRPO(policy=policy))
    plain = np.where(mask, -weight * fields["advantage"], 0)
    np.testing.assert_allclose(gradient, plain, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(metrics["policy/ratio_mean"])[mask], 1.0)
    for name in {"policy/clip_fraction", "policy/clip_fraction_lower", "policy/kl_old"} & metrics.keys():
        assert not metrics[name].any(), name
    if isinstance(policy, SAPOLoss):
        np.testing.assert_array_equal(metrics["policy/gate"], mask)


@_each_loss
def test_the_sampler_as_old_policy_gives_the_plain_policy_gradient_too(policy):
    logp, mask, weight, fields = packed(math.nan)
    fields["sampler_logp"] = fields.pop("old_logp")
    _, gradient = loss_and_gradient(logp, mask, weight, fields, GRPO(policy=policy))
    np.testing.assert_allclose(gradient, np.where(mask, -weight * fields["advantage"], 0), rtol=1e-6)


@_each_loss
@pytest.mark.parametrize("poison", [-math.inf, math.inf, math.nan, 1e30])
def test_tokens_that_are_not_trained_on_change_nothing(policy, poison):
    settings = GRPO(policy=policy)
    clean = loss_and_gradient(*packed(), settings)
    dirty = loss_and_gradient(*packed(poison), settings)
    for got, wanted in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_array_equal(got, wanted)
    assert not np.asarray(dirty[1])[~packed()[1]].any()


@_each_loss
def test_sequences_count_alike_packed_and_alone(policy):
    logp, mask, weight, fields = packed(math.nan)
    settings = GRPO(policy=policy)
    (loss, _), gradient = loss_and_gradient(logp, mask, weight, fields, settings)
    alone = [np.where(mask & (fields["segment"] == own), own + 3, 0).astype(np.int32) for own in (1, 2, 3)]
    parts = [loss_and_gradient(logp, ids > 0, weight, fields | {"segment": ids}, settings) for ids in alone]
    np.testing.assert_allclose(loss, sum(part[0][0] for part in parts), rtol=1e-5)
    np.testing.assert_allclose(gradient, sum(part[1] for part in parts), rtol=1e-6)


@_each_loss
def test_improbable_tokens_leave_loss_and_gradient_finite(policy):
    logp, mask, weight, fields = packed()
    at = tuple(np.argwhere(mask)[5])
    for name, value in {"old_logp": -math.inf, "logp": -1e30}.items():
        changed = {name: np.array(x) for name, x in (fields | {"logp": logp}).items()}
        changed[name][at] = value
        arrays = changed.pop("logp"), mask, weight, changed
        (loss, _), gradient = loss_and_gradient(*arrays, GRPO(policy=policy))
        assert np.isfinite(loss) and np.isfinite(gradient).all()


@_each_loss
def test_a_batch_of_untrained_rows_has_no_loss_and_no_gradient(policy):
    logp, mask, weight, fields = packed(math.nan)
    (loss, _), gradient = loss_and_gradient(logp, np.zeros_like(mask), weight, fields, GRPO(policy=policy))
    assert loss == 0
    assert not np.asarray(gradient).any()


@jax.jit
def gspo_ratio(log_ratio, segment):
    zeros = jnp.zeros_like(log_ratio)
    return algos.gspo_loss(PolicyTokens(log_ratio, zeros, zeros + 1, segment), GSPOLoss()).ratio


def ratio_of(log_ratio, segment=None):
    """Return the ratios of one row; the row is one sequence unless segments are given."""
    rest = 401 - len(log_ratio)
    ids = np.pad(segment or [1] * len(log_ratio), (0, rest)).astype(np.int32)
    return np.asarray(gspo_ratio(np.pad(np.float32(log_ratio), (0, rest))[None], ids[None]))[0, : len(log_ratio)]


def test_the_ratio_of_gspo_is_normalised_by_length():
    np.testing.assert_allclose(ratio_of([0.01] * 400), math.exp(0.01), rtol=1e-6)
    np.testing.assert_allclose(ratio_of([0.01]), math.exp(0.01), rtol=1e-6)
    one_of_many = ratio_of([0.4] + [0.0] * 399)
    np.testing.assert_allclose(one_of_many, math.exp(0.001), rtol=1e-6)
    both = ratio_of([0.01] + [0.0] * 399 + [0.3], segment=[1] * 400 + [2])
    np.testing.assert_allclose(both, [math.exp(0.01 / 400)] * 400 + [math.exp(0.3)], rtol=1e-6)


def test_a_response_of_one_token_has_the_clipped_loss_of_that_token():
    logp, mask, weight, fields = packed()
    fields["segment"] = np.broadcast_to(np.arange(1, _WIDTH + 1, dtype=np.int32), mask.shape)
    policies = GSPOLoss(clip_low=0.05, clip_high=0.08), PolicyLoss(clip_low=0.05, clip_high=0.08, dual_clip=None)
    (one, _), one_gradient = loss_and_gradient(logp, mask, weight, fields, GRPO(policy=policies[0]))
    (other, _), other_gradient = loss_and_gradient(logp, mask, weight, fields, GRPO(policy=policies[1]))
    np.testing.assert_allclose(one, other, rtol=1e-6)
    np.testing.assert_allclose(one_gradient, other_gradient, rtol=1e-6)


def test_gspo_asks_for_segments():
    logp, mask, weight, fields = packed()
    del fields["segment"]
    with pytest.raises(ValueError, match="GSPO requires the field 'segment'"):
        loss_and_gradient(logp, mask, weight, fields, GRPO(policy=GSPOLoss()))


def test_segment_means_equal_a_loop():
    rng = np.random.default_rng(0)
    segment = np.asarray([[3, 3, 1, 0, 7, 3, 1, 7], [0] * 8, [8] * 8], np.int32)
    value = np.where(segment > 0, rng.normal(size=segment.shape), math.nan).astype(np.float32)
    wanted = np.zeros(segment.shape)
    for row, t in np.argwhere(segment > 0):
        wanted[row, t] = value[row][segment[row] == segment[row, t]].astype(np.float64).mean()
    np.testing.assert_allclose(algos.segment_mean(value, segment), wanted, rtol=1e-6, atol=1e-7)


@dataclasses.dataclass(frozen=True)
class Plain(RatioLoss):
    """A loss of a user's own: REINFORCE, scaled."""

    scale: float = 2.0

    @staticmethod
    def function(tokens, settings):
        return PolicyTerms(-settings.scale * tokens.advantage * tokens.logp, jnp.exp(tokens.log_ratio), {})


def test_a_loss_of_a_users_own_is_a_class_with_a_function():
    logp, mask, weight, fields = packed(math.nan)
    (_, metrics), gradient = loss_and_gradient(logp, mask, weight, fields, GRPO(policy=Plain()))
    np.testing.assert_allclose(gradient, np.where(mask, -2 * weight * fields["advantage"], 0), rtol=1e-6)
    assert metrics.keys() == {"policy/kl_old", "policy/ratio_mean"}
