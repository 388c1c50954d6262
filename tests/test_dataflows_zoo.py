"""Steps that are more than an advantage of scores: several rewards, self-play, pairs without a reference, KTO."""

import statistics
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from made_steps import Made, done, rollout_of

from jaxrlhf.batch import EpisodeRows, Pair, Scores
from jaxrlhf.config import (
    CPO,
    GDPO,
    KTO,
    ORPO,
    RAE,
    Arithmetic,
    ArithmeticPairs,
    ArithmeticReward,
    Config,
    FormatReward,
    FromScratch,
    MaxRL,
    Refusal,
    Rewards,
    Rollout,
    SimPO,
    Tools,
)
from jaxrlhf.dataflows import dpo, group_baselines, turn_level
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import StepInput

MASK = np.arange(5) < np.array([3, 2, 4, 1, 2, 5])[:, None]


def config(algorithm, **changes) -> Config:
    settings = {"data": Arithmetic(), "rollout": Rollout(2, 3, max_prompt_tokens=4, max_response_tokens=6), **changes}
    return Config(name="zoo", algorithm=algorithm, steps=1, model=FromScratch(), **settings)


def step(learn, settings: Config, batch, state=None):
    made = Made(lambda *_: None, lambda *_: None)
    work = StepInput(settings, [], 0, {**settings.algorithm.initial_state(), **(state or {})})
    result = learn(SimpleNamespace(actor=made), work, batch)
    return result, made


def test_gdpo_tells_responses_of_one_total_apart():
    parts = {"format": np.float32([1, 0, 0, 1, 1, 0]), "arithmetic": np.float32([0, 1, 0, 0, 1, 1])}
    rewards = Rewards(parts=(ArithmeticReward(), FormatReward(weight=0.5)))
    score = parts["arithmetic"] + 0.5 * parts["format"]
    rollout = rollout_of(MASK, [0, 0, 0, 1, 1, 1])
    batch = ScoredRollout([], rollout, Scores(score, np.ones(6, bool), parts))
    _, made = step(group_baselines.gdpo, config(GDPO(responses_per_update=6), rewards=rewards), batch)

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
    settings = config(GDPO(responses_per_update=6), rewards=Rewards(parts=(FormatReward(),)), environment=tools)
    found = []
    for record, own in ((cut, parts), (cut & False, {name: np.where(cut, 0, part) for name, part in parts.items()})):
        stops = np.array([SimpleNamespace(environment=0, stop="turns" if one else "done") for one in record])
        scores = Scores(np.where(cut, 0, sum(parts.values())), np.ones(6, bool), own)
        batch = ScoredRollout([], rollout_of(MASK, [0, 0, 0, 1, 1, 1]), scores, record_E=stops)
        found.append(step(group_baselines.gdpo, settings, batch)[1].rows("advantage"))
    np.testing.assert_array_equal(*found)


def test_scores_below_zero_are_refused_by_maxrl():
    scores = Scores(np.float32([1, 0, -0.5, 0, 1, 1]), np.ones(6, bool), {})
    batch = ScoredRollout([], rollout_of(MASK, [0, 0, 0, 1, 1, 1]), scores)
    with pytest.raises(Refusal, match=r"MaxRL divides by the mean score .* has the score -0\.5"):
        step(group_baselines.maxrl, config(MaxRL(responses_per_update=6)), batch)


def test_self_play_has_a_baseline_for_each_game_and_player():
    turn = np.where(MASK, np.minimum(np.arange(5), 2), -1).astype(np.int16)
    paid = np.zeros(MASK.shape, np.float32)
    paid[0, 0], paid[2, 1], paid[5, 4] = 1, 2, -1
    rows = EpisodeRows(np.arange(6), turn, paid, np.full(MASK.shape, -1))
    rollout = replace(rollout_of(MASK, [0, 0, 0, 1, 1, 1]), episodes=rows)
    games = [0, 1, 0, 0, 1, 1]
    record = np.array([SimpleNamespace(environment=game) for game in games])
    scores = Scores(np.float32([1, 0, 2, 0, 3, -1]), np.array([True] * 5 + [False]), {})
    batch = ScoredRollout([], rollout, scores, record_E=record)
    settings = config(RAE(responses_per_update=6, decay=0.75), environment=Tools(functions=("jaxrlhf.episode:Reply",)))
    result, made = step(turn_level.rae, settings, batch, state={"baseline/1/1": 2.0})

    first = [1.0, 0.0, -2.0, 0.0, -3.0]  # of the first player; the rest of the fifth score is that of its last turn, 1
    means = {0: np.mean([1, -2, 0]), 1: np.mean([0, -3])}
    wanted = np.zeros(MASK.shape)
    for game in (0, 1):
        for player in (0, 1):
            sign, before = 1 - 2 * player, 2.0 if (game, player) == (1, 1) else 0.0
            baseline = 0.75 * before + 0.25 * sign * means[game]
            assert result.state[f"baseline/{game}/{player}"] == pytest.approx(baseline)
            for row in range(5):
                if games[row] == game:
                    wanted[row, MASK[row] & (turn[row] % 2 == player)] = sign * first[row] - baseline
    np.testing.assert_allclose(made.rows("advantage"), wanted, rtol=1e-5, atol=1e-6)
    assert settings.algorithm.resumed_state(result.state) == result.state


PAIRS = [Pair(n, "", (1, 2), solution_tokens=(3,) * (n + 1), rejected_tokens=(4,) * (4 - n)) for n in range(3)]


class Policies:
    """Log-probabilities that are known of every token, and what an update was made of."""

    def __init__(self):
        self.seen = []

    def compute_log_prob(self, sequences, *, temperature):
        self.seen.append(sequences)
        return done(np.where(sequences.mask_BT, -0.1 * sequences.token_BT, np.nan).astype(np.float32))

    def compute_ref_log_prob(self, sequences, *, temperature):
        return done(np.where(sequences.mask_BT, -0.2, np.nan).astype(np.float32))

    def update_actor(self, minibatches, *, objective, settings, temperature):
        [self.batch] = minibatches
        return done({})


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("algorithm", [SimPO(), CPO(nll_coefficient=0.5), ORPO(odds_coefficient=0.3), KTO(beta=0.2)])
def test_a_step_on_pairs_has_the_loss_as_written(algorithm):
    roles = SimpleNamespace(actor=Policies())
    if isinstance(algorithm, KTO):
        roles.reference = roles.actor  # others have none
    algorithm = replace(algorithm, pairs_per_update=3)
    settings = config(algorithm, data=ArithmeticPairs(), rewards=Rewards())
    assert ("reference" in settings.roles) == isinstance(algorithm, KTO)
    result = dpo.learn(roles, StepInput(settings, PAIRS, 0, {}), PAIRS)
    counts = np.array([[n + 1, 4 - n] for n in range(3)])
    logp = counts * np.array([-0.3, -0.4])

    def loss(logp):
        mean = logp / counts
        match algorithm:
            case SimPO():
                return -np.log(sigmoid(2 * (mean[:, 0] - mean[:, 1]) - 1)).mean()
            case CPO():
                likelihood = -0.5 * logp[:, 0].sum() / counts[:, 0].sum()
                return -np.log(sigmoid(0.1 * (logp[:, 0] - logp[:, 1]))).mean() + likelihood
            case ORPO():
                odds = np.log(np.exp(mean) / (1 - np.exp(mean)))
                likelihood = -logp[:, 0].sum() / counts[:, 0].sum()
                return -0.3 * np.log(sigmoid(odds[:, 0] - odds[:, 1])).mean() + likelihood
        good, bad = (logp + 0.2 * counts).T
        return np.concatenate([1 - sigmoid(0.2 * good), 1 - sigmoid(-0.2 * bad)]).mean()

    assert result.metrics["preference/loss"] == pytest.approx(loss(logp), rel=1e-5)
    slopes = np.zeros((3, 2))
    for place in np.ndindex(3, 2):
        moved = np.zeros((3, 2))
        moved[place] = 1e-5
        slopes[place] = (loss(logp + moved) - loss(logp - moved)) / 2e-5
    mask = roles.actor.batch.sequences.mask_BT
    np.testing.assert_array_equal(mask.sum(axis=1), counts.ravel())
    np.testing.assert_allclose(
        roles.actor.batch.weight_BT, np.where(mask, slopes.reshape(-1, 1), 0), rtol=1e-4, atol=1e-6
    )
    if isinstance(algorithm, KTO):  # all answers are less likely than by the reference
        assert result.metrics["preference/distance"] == 0
        assert roles.actor.seen[0].token_BT[0].tolist()[:5] == [1, 2, 3, 3, 3], "the answer of another pair"
