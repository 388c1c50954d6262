"""Safe RLHF: what a step makes of rewards and costs, and examples among responses."""

import math
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from made_steps import episodes_of, problem, rollout_of
from tiny_runs import get_config, training

from jaxrlhf.algos import TokenOutput, mixed_objective, policy_objective
from jaxrlhf.batch import Problem, Scores
from jaxrlhf.config import (
    PPO,
    AdaptiveKL,
    ArithmeticPairs,
    Constraint,
    FormatReward,
    FromScratch,
    KLInLoss,
    KLInReward,
    Pool,
    PromptFile,
    Ptx,
    Rewards,
    SafeRLHF,
    checked,
)
from jaxrlhf.dataflows import ppo, safe_rlhf
from jaxrlhf.dataflows.sft import supervised_batch, with_examples
from jaxrlhf.dataflows.step import StepInput
from jaxrlhf.models import from_scratch
from jaxrlhf.planner.problem import roles_of

PARTS = (FormatReward(weight=1.0), FormatReward(pattern="x", weight=0.0))
MASK = np.array([[0, 1, 1, 1, 0], [0, 1, 0, 1, 1], [0, 1, 1, 0, 0], [0, 1, 1, 1, 1]], bool)
COSTS = (1.0, 0.0, 2.0, 0.0)
PLAIN = SafeRLHF(responses_per_update=4, kl=None, critic=training(), cost_critic=training())


def work_of(algorithm, **state: float) -> StepInput:
    config = replace(get_config(), algorithm=algorithm, rewards=Rewards(parts=PARTS))
    return StepInput(config, [], state.pop("index", 0), {**algorithm.initial_state(), **state})


def given(costs=COSTS, scorable=(True, True, True, True)):
    """A rollout, its scores and what models say of it."""
    draw = np.random.default_rng(0)
    rollout = rollout_of(MASK, [0, 0, 1, 1])
    score = np.array([0.5, -1.0, 0.25, 2.0], np.float32)
    scores = Scores(score, np.array(scorable), {"format": score, "format_2": np.array(costs, np.float32)})
    old, ref, value, cost_value = (draw.normal(size=MASK.shape).astype(np.float32) for _ in range(4))
    return rollout, scores, old, ref, value, cost_value


def prepared(algorithm, *, costs=COSTS, scorable=(True,) * 4, **state):
    return safe_rlhf.prepare(work_of(algorithm, **state), *given(costs, scorable))


def rows(batches, name):
    """A field of the minibatches, by rows as they were generated."""
    found = np.concatenate([np.asarray(batch.fields[name]) for batch in batches])
    return found[np.argsort(np.concatenate([batch.sequences.token_BT[:, 0] for batch in batches]))]


def test_where_costs_have_no_price_it_is_ppo():
    settings = {"responses_per_update": 4, "lam": 0.9, "kl": KLInReward(coefficient=0.3), "critic": training()}
    constraint = Constraint(multiplier=1e-12, delay_steps=1)
    safe = prepared(SafeRLHF(constraint=constraint, cost_critic=training(), **settings))
    *both, _ = given()
    plain = ppo.prepare(work_of(PPO(**settings)), *both)
    for mine, theirs in ((safe.policy, plain.policy), (safe.value, plain.value)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), list(mine), list(theirs))
    assert plain.metrics.items() <= safe.metrics.items()


def test_advantages_weigh_reward_against_cost_at_the_price_after_its_step():
    algorithm = replace(PLAIN, constraint=Constraint(limit=0.25, multiplier=1.5, learning_rate=0.2))
    done = prepared(algorithm)
    price = 1.5 * math.exp(0.2 * 1.5 * (0.75 - 0.25))  # costs are 1, 0, 2 and 0
    assert done.state["multiplier"] == done.metrics["cost/multiplier"] == pytest.approx(price)
    assert (done.metrics["cost/mean"], done.metrics["cost/unsafe_fraction"]) == (0.75, 0.5)
    _, scores, _, _, value, cost_value = given()
    wanted = np.zeros(MASK.shape)
    for row, mask in enumerate(MASK):  # gamma and lambda are 1: what comes in the end, less what was expected
        wanted[row][mask] = scores.score_B[row] - value[row][mask] - price * (COSTS[row] - cost_value[row][mask])
    wanted /= 1 + price
    wanted = np.where(MASK, (wanted - wanted[MASK].mean()) / wanted[MASK].std(ddof=1), 0)
    np.testing.assert_allclose(rows(done.policy, "advantage"), wanted, atol=1e-5)
    np.testing.assert_allclose(
        rows(done.further, "returns")[MASK], np.broadcast_to(np.array(COSTS)[:, None], MASK.shape)[MASK], atol=1e-6
    )


@pytest.mark.parametrize("clip", [50.0, 0.4])
def test_a_kl_is_taken_from_rewards_and_added_to_costs(clip):
    algorithm = replace(PLAIN, kl=KLInReward(coefficient=0.2), clip_rewards=clip)
    done = prepared(algorithm)
    _, scores, old, ref, _, _ = given()
    for batches, sign, end_B in ((done.value, -1, scores.score_B), (done.further, 1, COSTS)):
        wanted = np.zeros(MASK.shape)
        for row, mask in enumerate(MASK):
            paid = sign * 0.2 * (old - ref)[row][mask]
            paid[-1] += end_B[row]
            wanted[row][mask] = np.cumsum(np.clip(paid, -clip, clip)[::-1])[::-1]
        np.testing.assert_allclose(rows(batches, "returns"), wanted, atol=1e-5)
    assert done.metrics["kl/coefficient"] == 0.2


def test_what_an_environment_pays_for_a_turn_is_reward_and_no_cost():
    rollout, *rest = given()
    paid = np.zeros(MASK.shape, np.float32)
    paid[0, 1] = 0.75  # of the 0.5 that the episode scored in all
    turns = episodes_of(np.where(MASK, 0, -1), paid)
    done = safe_rlhf.prepare(work_of(PLAIN), replace(rollout, episodes=turns), *rest)
    np.testing.assert_allclose(rows(done.value, "returns")[0, MASK[0]], [0.5, -0.25, -0.25], rtol=1e-6)
    np.testing.assert_allclose(rows(done.further, "returns")[0, MASK[0]], [COSTS[0]] * 3, rtol=1e-6)


def test_a_response_without_a_cost_is_trained_on_by_nobody():
    done = prepared(PLAIN, costs=(1.0, np.nan, 2.0, 0.0), scorable=(True, True, True, False))
    for batches in (done.policy, done.value, done.further):
        trained = {int(row) for batch in batches for row in batch.sequences.token_BT[batch.sequences.mask_BT.any(1), 0]}
        assert trained == {0, 2}
        assert all(np.isfinite(field).all() for batch in batches for field in batch.fields.values())
    assert done.metrics["cost/mean"] == 1.5


def test_a_step_without_any_cost_moves_no_price():
    done = prepared(PLAIN, costs=(np.nan,) * 4, multiplier=2.0)
    assert done.state["multiplier"] == 2.0
    assert math.isnan(done.metrics["cost/mean"])


def test_the_multiplier_rests_at_the_start_and_outlives_a_restart():
    algorithm = replace(PLAIN, constraint=Constraint(delay_steps=3, multiplier=2.0))
    assert prepared(algorithm, index=2).state["multiplier"] == 2.0
    assert prepared(algorithm, index=3).state["multiplier"] != 2.0
    assert algorithm.initial_state() == {"kl_coefficient": 0.0, "multiplier": 2.0}
    assert algorithm.resumed_state({"kl_coefficient": 0.0, "multiplier": 0.3})["multiplier"] == 0.3
    adaptive = replace(algorithm, kl=KLInReward(adaptive=AdaptiveKL()))
    assert adaptive.resumed_state({"kl_coefficient": 0.7, "multiplier": 0.3}) == {
        "kl_coefficient": 0.7,
        "multiplier": 0.3,
    }


# Examples among responses.


def solved(number: int, tokens: int) -> Problem:
    return replace(problem(number), prompt_tokens=(7, 8), solution_tokens=tuple(range(1, tokens + 1)))


def test_examples_lie_below_the_responses_and_weigh_their_coefficient():
    algorithm = replace(PLAIN, responses_per_update=2, kl=KLInLoss(coefficient=0.1))
    plain = prepared(algorithm).policy
    problems = [solved(number, tokens) for number, tokens in enumerate((1, 3, 2, 2))]
    found = with_examples(plain, problems, each=2, coefficient=0.5)
    assert len(found) == len(plain) == 2
    for batch, before, own in zip(found, plain, (problems[:2], problems[2:]), strict=True):
        alone = supervised_batch(own, width=MASK.shape[1])
        assert len(batch.weight_BT) == 4
        np.testing.assert_array_equal(batch.sequences.token_BT[2:], alone.sequences.token_BT)
        np.testing.assert_array_equal(batch.sequences.mask_BT[2:], alone.sequences.mask_BT)
        np.testing.assert_allclose(batch.fields["example_weight"][2:], 0.5 * alone.weight_BT)
        assert not batch.fields["example_weight"][:2].any() and not batch.weight_BT[2:].any()
        for name, field in before.fields.items():
            np.testing.assert_array_equal(batch.fields[name][:2], field)
            assert not batch.fields[name][2:].any()
        # A prompt of another source is nobody's group.
        assert not set(batch.sequences.prompt_id_B[2:]) & set(batch.sequences.prompt_id_B[:2])
        assert len(set(batch.sequences.prompt_id_B[2:])) == 2


def test_examples_of_a_minibatch_that_teaches_nothing_are_left_out_with_it():
    algorithm = replace(PLAIN, responses_per_update=1, ptx=Ptx(examples_per_update=2))
    work = replace(work_of(algorithm), examples=[solved(number, 2) for number in range(8)])
    done = safe_rlhf.prepare(work, *given(scorable=(True, False, True, False)))
    assert [len(batch.weight_BT) for batch in done.policy] == [3, 3]
    assert [len(batches) for batches in (done.value, done.further)] == [2, 2]
    for batch in done.policy:
        assert np.any(batch.weight_BT[0]) and np.any(batch.fields["example_weight"][1:])


def test_the_objective_of_both_is_the_sum_of_each_and_its_metrics_are_of_each():
    draw = np.random.default_rng(2)
    plain = prepared(PLAIN).policy
    (batch,) = with_examples(plain, [solved(0, 3), solved(1, 1)], each=2, coefficient=0.7)
    mask = batch.sequences.mask_BT
    logp = np.where(mask, draw.normal(-1, 0.3, mask.shape), -np.inf).astype(np.float32)

    @partial(jax.jit, static_argnums=0)
    @partial(jax.grad, argnums=1, has_aux=True)
    def slope_and_terms(objective, logp, mask, weight, fields):
        terms = objective(TokenOutput(logp), mask, weight, fields, PLAIN)
        return terms.loss.sum(), terms

    slope, found = slope_and_terms(mixed_objective, logp, mask, batch.weight_BT, dict(batch.fields))
    (alone,) = plain
    own, policy = slope_and_terms(policy_objective, logp[:4], mask[:4], alone.weight_BT, dict(alone.fields))
    nll = -0.7 * logp[4:][mask[4:]].mean()
    assert float(found.loss.sum()) == pytest.approx(float(policy.loss.sum() + nll), rel=1e-5)
    expected = np.zeros(mask.shape)
    expected[:4] = own
    expected[4:][mask[4:]] = -0.7 / mask[4:].sum()
    np.testing.assert_allclose(slope, expected, atol=1e-6)
    for name, value in policy.metrics.items():
        assert found.metrics[name][mask].mean() == pytest.approx(float(value[mask[:4]].mean()), rel=1e-5, abs=1e-7)
    assert found.metrics["ptx/loss"][mask].mean() == pytest.approx(float(nll) / 0.7, rel=1e-5)


# Settings.


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"constraint": Constraint(part=2)}, "algorithm.constraint.part=2 is the index of the cost, but rewards.parts"),
        (
            {"constraint": Constraint(part=0)},
            "rewards.parts.0 is the cost .* so weight=1.0 would count the cost twice",
        ),
        ({"ptx": ArithmeticPairs()}, "data is ArithmeticPairs: no worked solutions"),
        ({"ptx": PromptFile("train.jsonl")}, "data is PromptFile: solution_key is None"),
        ({"constraint": (6.0, 5.0)}, "multiplier=6.0 is above largest_multiplier=5.0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    def build():
        ready = dict(settings)
        if "ptx" in ready:
            ready["ptx"] = Ptx(data=ready["ptx"])
        if isinstance(ready.get("constraint"), tuple):
            ready["constraint"] = Constraint(
                multiplier=ready["constraint"][0], largest_multiplier=ready["constraint"][1]
            )
        return replace(get_config(), algorithm=replace(PLAIN, **ready), rewards=Rewards(parts=PARTS))

    with pytest.raises(ValueError, match=message):
        checked(build())


def test_its_models_are_planned_and_placed_as_two_critics():
    config = replace(get_config(), algorithm=PLAIN, rewards=Rewards(parts=PARTS), devices=None)
    found = {role.name: role for role in roles_of(config, lambda _: from_scratch(FromScratch(), tokens=64))}
    assert {name: (role.head, role.trained, role.passes) for name, role in found.items()} == {
        "actor": ("lm", True, 1),
        "critic": ("value", True, 1),
        "cost_critic": ("value", True, 1),
    }
    apart = (Pool("a", 1, ("actor", "critic", "reward")), Pool("b", 1, ("cost_critic",)))
    assert replace(config, pools=apart, offload=("cost_critic.optimizer",)).pools == apart
    with pytest.raises(ValueError, match="pools do not place cost_critic"):
        checked(replace(config, pools=apart[:1]))
