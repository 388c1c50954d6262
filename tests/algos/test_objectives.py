"""Aggregation weights and objectives: oracles, invariance to the split, and masks that hide infinities."""

import dataclasses
import math
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf import algos
from jaxrlhf.algos import PolicyTokens, TokenOutput
from jaxrlhf.config import GRPO, PPO, KLInLoss, KLInReward, PolicyLoss, ValueLoss

_MODES = [
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "prompt-mean",
]
_ROWS, _WIDTH, _HORIZON = 6, 10, 16
_PROMPT = np.asarray([2**40, 3, 2**40, 3, 5, 2**41])
_SETTINGS = GRPO(
    policy=PolicyLoss(clip_low=0.2, clip_high=0.28, entropy_coefficient=0.01), kl=KLInLoss(coefficient=0.1)
)


def random_mask(seed=0):
    """Rows 4 and 5 are empty, and with them two of four prompts."""
    mask = np.random.default_rng(seed).random((_ROWS, _WIDTH)) < 0.6
    mask[4:] = False
    return mask


def experience(mask, *, seed=1, mode="token-mean", poison=0.0):
    """Everything the policy objective reads, with `poison` outside the mask (weights excepted)."""
    rng = np.random.default_rng(seed)

    def fill(x):
        return np.where(mask, x, poison).astype(np.float32)

    old_logp = -rng.exponential(size=mask.shape)
    weight = np.asarray(algos.token_weights(mask, _PROMPT[: len(mask)], aggregation=mode, horizon=_HORIZON))
    fields = {
        "old_logp": fill(old_logp),
        "advantage": fill(rng.normal(size=mask.shape)),
        "ref_logp": fill(old_logp + 0.1 * rng.normal(size=mask.shape)),
        "kl_weight": 0.1 * weight,
        "entropy_weight": 0.01 * weight,
    }
    output = TokenOutput(fill(old_logp + 0.4 * rng.normal(size=mask.shape)), fill(rng.random(mask.shape)))
    return output, weight, fields


def weights_oracle(mask, mode):
    """The exact weight of a token in each row, from the definition of each mean."""
    tokens = [int(n) for n in mask.sum(1)]
    sequences = sum(n > 0 for n in tokens)
    of_prompt = {p: sum(n for n, q in zip(tokens, _PROMPT, strict=True) if p == q) for p in _PROMPT}
    prompts = sum(n > 0 for n in of_prompt.values())
    for n, p in zip(tokens, _PROMPT, strict=True):
        if n == 0:
            yield Fraction(0)
        else:
            yield {
                "token-mean": Fraction(1, sum(tokens)),
                "token-sum": Fraction(1),
                "seq-mean-token-mean": Fraction(1, sequences * n),
                "seq-mean-token-sum": Fraction(1, sequences),
                "seq-mean-token-sum-norm": Fraction(1, sequences * _HORIZON),
                "prompt-mean": Fraction(1, prompts * of_prompt[p]),
            }[mode]


@pytest.mark.parametrize("mode", _MODES)
def test_weights_equal_their_definition(mode):
    for seed in range(3):
        mask = random_mask(seed)
        row = np.asarray([float(w) for w in weights_oracle(mask, mode)])
        got = algos.token_weights(mask, _PROMPT, aggregation=mode, horizon=_HORIZON)
        np.testing.assert_allclose(got, mask * row[:, None], rtol=1e-6)
        compiled = jax.jit(lambda m, p: algos.token_weights(m, p, aggregation=mode, horizon=_HORIZON))
        np.testing.assert_allclose(compiled(mask, (_PROMPT % 97).astype(np.int32)), got, rtol=1e-6)


@pytest.mark.parametrize("mode", _MODES)
def test_weights_of_an_empty_batch_are_zero(mode):
    weight = algos.token_weights(np.zeros((_ROWS, _WIDTH), bool), _PROMPT, aggregation=mode, horizon=_HORIZON)
    np.testing.assert_array_equal(weight, 0)


@pytest.mark.parametrize("mode", _MODES)
def test_weights_do_not_depend_on_padding_or_row_order(mode):
    mask = random_mask()
    weight = algos.token_weights(mask, _PROMPT, aggregation=mode, horizon=_HORIZON)
    order = np.random.default_rng(0).permutation(_ROWS)
    wider = np.pad(mask, ((0, 0), (3, 5)))[order]
    moved = algos.token_weights(wider, _PROMPT[order], aggregation=mode, horizon=_HORIZON)
    np.testing.assert_array_equal(np.asarray(moved)[:, 3:-5], np.asarray(weight)[order])


def test_a_mode_says_what_it_lacks():
    with pytest.raises(ValueError, match="horizon=None, but aggregation seq-mean-token-sum-norm"):
        algos.token_weights(random_mask(), aggregation="seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="pass prompt_id_B"):
        algos.token_weights(random_mask(), aggregation="prompt-mean")


def repacked(arrays, mask, layout):
    """Chosen tokens of a `[B, T]` tree, moved to `layout`: for each packed row, the flat places it takes."""

    def move(x):
        flat = np.asarray(x)[mask]
        width = max(map(len, layout))
        return np.stack([np.pad(flat[places], (0, width - len(places))) for places in layout])

    return jax.tree.map(move, arrays), np.stack([np.arange(max(map(len, layout))) < len(p) for p in layout])


@jax.jit
@jax.value_and_grad
def loss_and_gradient(logp, entropy, mask, weight, fields):
    return algos.policy_objective(TokenOutput(logp, entropy), mask, weight, fields, _SETTINGS).loss.sum()


@pytest.mark.parametrize("mode", _MODES)
def test_loss_and_gradient_do_not_depend_on_packing_or_microbatches(mode):
    mask = random_mask()
    output, weight, fields = experience(mask, mode=mode, poison=math.nan)

    loss, gradient = loss_and_gradient(output.logp, output.entropy, mask, weight, fields)
    wanted = np.asarray(gradient)[mask]
    places = np.random.default_rng(0).permutation(mask.sum())
    for rows, microbatches in [(1, 1), (4, 1), (4, 4), (6, 2)]:
        layout = np.array_split(places, rows)
        arrays, packed_mask = repacked((output.logp, output.entropy, weight, fields), mask, layout)
        loss_sum, pieces = 0.0, np.zeros_like(wanted)
        for part in np.array_split(np.arange(rows), microbatches):
            logp, entropy, part_weight, part_fields = jax.tree.map(lambda x, rows=part: x[rows], arrays)
            part_loss, part_gradient = loss_and_gradient(logp, entropy, packed_mask[part], part_weight, part_fields)
            loss_sum += float(part_loss)
            for row, values in zip(part, np.asarray(part_gradient), strict=True):
                pieces[layout[row]] = values[: len(layout[row])]
        np.testing.assert_allclose(loss_sum, loss, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(pieces, wanted, rtol=1e-6)


def policy_oracle(logp, old, advantage, *, low=0.2, high=0.28, dual=3.0):
    """Loss of one token and its derivative by logp, case by case; whether it clips, and on which side."""
    ratio = math.exp(logp - old)
    if advantage >= 0:
        clipped = ratio > 1 + high
        return (-advantage * min(ratio, 1 + high), 0.0 if clipped else -advantage * ratio, clipped, False)
    if ratio > dual:
        return (-advantage * dual, 0.0, False, True)
    clipped = ratio < 1 - low
    return (-advantage * max(ratio, 1 - low), 0.0 if clipped else -advantage * ratio, clipped, False)


def test_clipped_policy_loss_equals_its_cases():
    log_ratio, advantage = np.meshgrid([-3.0, -0.3, -0.1, 0.0, 0.1, 0.3, 1.0, 1.2, 4.0], [-2.0, -0.5, 0.0, 0.5, 2.0])
    old = np.full_like(log_ratio, -1.0)
    arrays = [x.astype(np.float32) for x in (old + log_ratio, old, advantage)]
    settings = PolicyLoss(clip_low=0.2, clip_high=0.28, dual_clip=3.0)

    def terms_of(logp):
        return algos.clipped_policy_loss(PolicyTokens(logp, *arrays[1:]), settings)

    terms = jax.jit(terms_of)(arrays[0])
    gradient = jax.jit(jax.grad(lambda logp: terms_of(logp).loss.sum()))(arrays[0])
    cases = [policy_oracle(*map(float, case)) for case in zip(*(x.ravel() for x in arrays), strict=True)]
    loss, slope, clipped, clipped_low = (np.reshape(column, old.shape) for column in zip(*cases, strict=True))
    active = advantage != 0
    np.testing.assert_allclose(terms.loss, loss, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(gradient)[active], slope[active], rtol=1e-5)
    for name, wanted in {"policy/clip_fraction": clipped, "policy/clip_fraction_lower": clipped_low}.items():
        np.testing.assert_array_equal(np.asarray(terms.metrics[name])[active], wanted[active])
    settings = dataclasses.replace(settings, dual_clip=None)
    without = terms_of(arrays[0])
    np.testing.assert_allclose(np.asarray(without.loss)[0, -1], 2.0 * math.exp(4.0), rtol=1e-5)
    assert not without.metrics["policy/clip_fraction_lower"].any()


def test_a_runaway_ratio_stays_finite():
    logp, old = np.float32([0.0, -500.0]), np.float32([-500.0, 0.0])

    def loss(x):
        settings = PolicyLoss(clip_low=0.2, clip_high=0.2, dual_clip=None)
        return algos.clipped_policy_loss(PolicyTokens(x, old, -jnp.ones(2)), settings).loss

    np.testing.assert_allclose(loss(logp), [math.exp(20), 0.8], rtol=1e-5)
    np.testing.assert_array_equal(jax.grad(lambda x: loss(x).sum())(logp), 0)


@partial(jax.jit, static_argnums=4)
@partial(jax.grad, has_aux=True)
def gradient_and_objective(output, mask, weight, fields, settings):
    objective = algos.policy_objective(output, mask, weight, fields, settings)
    return objective.loss.sum(), objective


@pytest.mark.parametrize("poison", [-math.inf, math.inf, math.nan, 1e30])
def test_what_lies_outside_the_mask_reaches_neither_value_nor_gradient(poison):
    mask = random_mask()
    clean, weight, fields = experience(mask)
    dirty, _, dirty_fields = experience(mask, poison=poison)
    dirty_fields |= {name: np.where(mask, fields[name], poison) for name in ("kl_weight", "entropy_weight")}
    dirty_weight = np.where(mask, weight, poison)
    for estimator in ("k3", "k1+"):
        settings = dataclasses.replace(_SETTINGS, kl=KLInLoss(coefficient=0.1, estimator=estimator))
        got_tree = gradient_and_objective(dirty, mask, dirty_weight, dirty_fields, settings)
        wanted_tree = gradient_and_objective(clean, mask, weight, fields, settings)
        for got, wanted in zip(jax.tree.leaves(got_tree), jax.tree.leaves(wanted_tree), strict=True):
            assert np.isfinite(got).all()
            np.testing.assert_array_equal(got, np.where(mask, wanted, 0))


@pytest.mark.parametrize("poison", [-math.inf, math.nan])
def test_value_and_supervised_objectives_ignore_what_lies_outside(poison):
    mask = random_mask()
    output, weight, fields = experience(mask, poison=poison)
    fields = {"old_value": fields["old_logp"], "returns": fields["advantage"]}
    value = output.logp

    def value_loss(value):
        return algos.value_objective(value, mask, weight, fields, ValueLoss(clip=0.2)).loss.sum()

    def nll(logp):
        return algos.nll_objective(TokenOutput(logp, output.entropy), mask, weight, {}, None).loss.sum()

    wanted = sum(
        max((v - r) ** 2, (min(max(v, o - 0.2), o + 0.2) - r) ** 2) / 2 / mask.sum()
        for v, o, r in zip(value[mask], fields["old_value"][mask], fields["returns"][mask], strict=True)
    )
    np.testing.assert_allclose(value_loss(value), wanted, rtol=1e-5)
    np.testing.assert_allclose(nll(value), -value[mask].mean(), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(nll)(value), np.where(mask, -weight, 0), rtol=1e-6)
    gradient = np.asarray(jax.grad(value_loss)(value))
    assert np.isfinite(gradient).all()
    assert not gradient[~mask].any()


def test_clipped_value_gradient_stops_only_where_the_clipped_error_is_larger():
    value, old, returns = np.float32([0.1, 0.9, 0.9, -0.9]), np.zeros(4, np.float32), np.float32([1.0, 0.5, 2.0, 2.0])

    def loss(v):
        return algos.clipped_value_loss(v, old, returns, clip=0.3)

    # Inside; outside, overshooting; outside, on the way to the target; outside, moving away.
    np.testing.assert_allclose(loss(value)[0], [0.405, 0.08, 1.445, 4.205], rtol=1e-5)
    np.testing.assert_array_equal(loss(value)[1], [False, False, True, False])
    np.testing.assert_allclose(jax.grad(lambda v: loss(v)[0].sum())(value), [-0.9, 0.4, 0.0, -2.9], rtol=1e-5)


def test_a_batch_without_trained_tokens_has_no_loss_and_no_gradient():
    mask = np.zeros((_ROWS, _WIDTH), bool)
    output, weight, fields = experience(mask, poison=math.nan)

    gradient, objective = gradient_and_objective(output, mask, weight, fields, _SETTINGS)
    assert len(jax.tree.leaves(gradient)) == 2
    for array in jax.tree.leaves((gradient, objective.loss)):
        np.testing.assert_array_equal(array, 0)


@pytest.mark.parametrize("name", ["old_logp", "advantage", "ref_logp", "kl_weight", "entropy_weight"])
def test_a_field_that_is_missing_is_named(name):
    mask = random_mask()
    output, weight, fields = experience(mask)
    del fields[name]
    with pytest.raises(ValueError, match=name):
        algos.policy_objective(output, mask, weight, fields, _SETTINGS)


@pytest.mark.parametrize("settings", [GRPO(), PPO(kl=KLInReward())])
def test_a_coefficient_that_the_settings_do_not_know_is_refused(settings):
    mask = random_mask()
    output, weight, fields = experience(mask)
    with pytest.raises(ValueError, match="'kl_weight', which is expected if and only if"):
        algos.policy_objective(output, mask, weight, fields, settings)
