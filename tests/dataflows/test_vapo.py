"""VAPO: what a critic-and-imitation step makes of a rollout.

It learns in `dataflows/test_learn.py`, and is killed and resumed in `runs/test_resume_algorithms.py`.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest
from made_steps import episodes_of
from tiny_runs import get_config, training

from jaxrlhf.algos import imitating_objective, policy_objective
from jaxrlhf.algos.objectives import TokenOutput
from jaxrlhf.batch import RolloutBatch, Scores, Sequences
from jaxrlhf.config import VAPO, Environment
from jaxrlhf.dataflows import vapo
from jaxrlhf.dataflows.step import StepInput

WIDTH = 8


def rollout_of(lengths: list[int]) -> RolloutBatch:
    """Responses of these lengths to prompts of one token, two to each."""
    length_B = np.array(lengths) + 1
    position_T = np.arange(WIDTH)
    mask_BT = (position_T >= 1) & (position_T < length_B[:, None])
    rows = len(lengths)
    sequences = Sequences(mask_BT.astype(np.int32), length_B, mask_BT, np.arange(rows) // 2)
    version_BT = np.zeros(mask_BT.shape, np.int32)
    return RolloutBatch(sequences, np.where(mask_BT, -1.0, 0.0), np.zeros(rows, bool), version_BT)


def prepared(settings: VAPO, scores: list[float], lengths: list[int], scorable: list[bool]):
    config = get_config()
    settings = replace(settings, critic_warmup_steps=0)
    config = replace(config, algorithm=settings, rollout=replace(config.rollout, max_response_tokens=WIDTH))
    work = StepInput(config, [], 0, {"kl_coefficient": 0.0})
    rollout = rollout_of(lengths)
    value_BT = np.random.default_rng(0).normal(size=rollout.sequences.mask_BT.shape).astype(np.float32)
    earned = Scores(np.array(scores, np.float32), np.array(scorable), {})
    return vapo.prepare(work, rollout, earned, None, None, value_BT)


def test_what_succeeded_is_imitated_with_equal_weights_in_every_minibatch() -> None:
    settings = VAPO(responses_per_update=4, imitation=0.5, success=0.0, critic=training())
    scores, scorable = [1.0, -1.0, 2.0, 0.0], [True, True, False, True]
    done = prepared(settings, scores, [3, 4, 5, 2], scorable)
    (batch,) = done.policy
    total = batch.fields["imitation_weight"].sum(axis=1)
    of_length = {3: 0.5, 4: 0.0, 5: 0.0, 2: 0.0}  # the unscorable one is not imitated, whatever its score
    for row, length in enumerate(np.asarray(batch.sequences.length_B) - 1):
        assert total[row] == pytest.approx(of_length[int(length)])
        assert len(np.unique(batch.fields["imitation_weight"][row, 1 : length + 1])) == 1
    assert done.metrics["vapo/success_fraction"] == pytest.approx(0.25)
    # The critic's targets are Monte Carlo returns: what a response earned in the end, at each of its tokens.
    (value,) = done.value
    for row, length in enumerate(np.asarray(value.sequences.length_B) - 1):
        earned = dict(zip([3, 4, 5, 2], scores, strict=True))[int(length)] if int(length) != 5 else 0.0
        np.testing.assert_allclose(value.fields["returns"][row, 1 : length + 1], earned, atol=1e-6)


def test_nothing_is_imitated_where_nothing_succeeded() -> None:
    settings = VAPO(responses_per_update=4, critic=training())
    done = prepared(settings, [-1.0] * 4, [3, 4, 5, 2], [True] * 4)
    assert not done.policy[0].fields["imitation_weight"].any()
    assert np.isfinite(done.policy[0].fields["advantage"]).all()


def test_where_turns_are_the_actions_the_length_that_lambda_goes_by_is_of_turns() -> None:
    settings = VAPO(actions="turns", responses_per_update=4, length_scale=1.0, critic_warmup_steps=0, critic=training())
    config = replace(get_config(), algorithm=settings, environment=Environment(factory="games:Maze"))
    rollout, work = rollout_of([6, 3, 2, 4]), StepInput(config, [], 0, {"kl_coefficient": 0.0})
    mask_BT = rollout.sequences.mask_BT
    turn_BT = np.where(mask_BT, (np.arange(WIDTH) - 1) // 2, -1).astype(np.int16)  # two tokens a turn: 3, 2, 1 and 2
    turns = episodes_of(turn_BT, np.zeros(mask_BT.shape))
    scores = Scores(np.ones(4, np.float32), np.ones(4, bool), {})
    done = vapo.prepare(work, replace(rollout, episodes=turns), scores, None, None, np.zeros(mask_BT.shape, np.float32))
    assert done.metrics["vapo/lambda_mean"] == pytest.approx(np.mean([2 / 3, 1 / 2, 0, 1 / 2]))


def test_the_objective_adds_the_imitated_tokens_to_the_policy_loss() -> None:
    draw = np.random.default_rng(3)
    mask = draw.random((2, 6)) < 0.7
    logp = np.where(mask, draw.normal(-2, 0.5, mask.shape), -np.inf).astype(np.float32)
    fields = {name: draw.normal(size=mask.shape).astype(np.float32) for name in ("advantage", "old_logp")}
    fields["imitation_weight"] = np.where(draw.random(mask.shape) < 0.5, 0.3, 0).astype(np.float32)
    weight, settings = np.full(mask.shape, 0.1, np.float32), VAPO(critic=training())

    def loss_and_slope(objective):
        compute = jax.value_and_grad(lambda x: objective(TokenOutput(x), mask, weight, fields, settings).loss.sum())
        return jax.jit(compute)(logp)

    added = -np.where(mask, fields["imitation_weight"] * np.where(mask, logp, 0), 0).sum()
    (whole, slope), (policy, own) = map(loss_and_slope, (imitating_objective, policy_objective))
    assert whole == pytest.approx(float(policy + added), rel=1e-5)
    np.testing.assert_allclose(slope - own, np.where(mask, -fields["imitation_weight"], 0), atol=1e-6)


@pytest.mark.parametrize("setting", [{"length_scale": 0.0}, {"imitation": -0.1}])
def test_settings_out_of_range_are_refused(setting) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        VAPO(**setting)
