"""Algorithms in files that give credit to turns: GRPO over turns, GiGPO, and RAE for self-play."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from made_steps import Made, episodes_of, problem, rollout_of

from jaxrlhf.batch import Scores
from jaxrlhf.config import (
    Arithmetic,
    Config,
    Environment,
    FromScratch,
    KLInReward,
    Refusal,
    Rollout,
    Tools,
    checked,
    load_module,
)
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import StepInput
from jaxrlhf.episode import EpisodeRecord, Reply

turn_grpo, gigpo, rae = map(load_module, ("turn_grpo", "gigpo", "rae"))
MASK = np.arange(5) < np.array([3, 2, 4, 1, 2, 5])[:, None]
TOOLS, GAME = Tools(functions=("jaxrlhf.episode:Reply",)), Environment(factory="games.py:Game")


def config(algorithm, **changes) -> Config:
    settings = {"data": Arithmetic(), "rollout": Rollout(2, 3, max_prompt_tokens=4, max_response_tokens=6), **changes}
    return checked(Config(name="turns", algorithm=algorithm, steps=1, model=FromScratch(), **settings))


def test_turns_are_compared_with_the_same_turn_of_the_group():
    """Two groups; of the first, one episode has a turn that no other reached."""
    turn_BT = np.array([[0, 1, 2], [0, 1, -1], [0, -1, -1], [0, 1, -1]])
    reward_BT = np.array([[0.0, 0, 4], [0, 2, 0], [5, 0, 0], [0, 1, 0]], np.float32)
    group_B = np.array([7, 7, 9, 9])
    relative = turn_grpo.turn_relative(reward_BT, turn_BT >= 0, turn_BT, group_B, gamma=1.0, normalize_std=False)
    assert np.asarray(relative).tolist() == [[1, 1, 0], [-1, -1, 0], [2, 0, 0], [-2, 0, 0]]


def test_states_are_compared_within_a_group_as_gigpo_has_it():
    """Hand table: returns 0.5 and 1 from state A of the first episode and 2 from that of the second; B is alone."""
    turn_BT = np.array([[0, -1, 1, 1], [0, 0, -1, -1], [0, -1, -1, -1]])
    anchor_BT = np.array([[5, -1, 5, 5], [5, 5, -1, -1], [5, -1, -1, -1]])
    reward_BT = np.array([[0.0, 0, 0.25, 0.75], [0, 2, 0, 0], [3, 0, 0, 0]], np.float32)
    group_B = np.array([0, 0, 1])
    how = {"gamma": 0.5, "normalize_std": False}
    relative = np.asarray(gigpo.state_relative(reward_BT, turn_BT >= 0, turn_BT, anchor_BT, group_B, **how))
    mean = (0.5 + 1 + 2) / 3
    expected = [[0.5 - mean, 0, 1 - mean, 1 - mean], [2 - mean, 2 - mean, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(relative, expected, atol=1e-6)


def test_turns_without_a_named_state_are_compared_with_nothing():
    random, turn_BT = np.random.default_rng(0), np.where(MASK, np.arange(5) // 2, -1)
    nowhere_BT, group_B = np.full(MASK.shape, -1), np.zeros(len(MASK), int)
    reward_BT, how = random.normal(size=MASK.shape).astype(np.float32), {"gamma": 0.9, "normalize_std": True}
    assert not np.any(gigpo.state_relative(reward_BT, MASK, turn_BT, nowhere_BT, group_B, **how))


def episodes(turn, state):
    """Two groups of three episodes in which every token was made in this turn and this state."""
    rows = (np.where(MASK, value, -1) for value in (turn, state))
    turn_BT, anchor_BT = rows
    paid_BT = np.zeros(MASK.shape, np.float32)
    own = episodes_of(turn_BT, paid_BT, anchor_BT=anchor_BT)
    scores = Scores(np.float32([1, 0, 0.25, 2, 0, 1]), np.ones(6, bool), {})
    rollout = replace(rollout_of(MASK, [0, 0, 0, 1, 1, 1]), episodes=own)
    return ScoredRollout([problem(0), problem(1)], rollout, scores)


@pytest.mark.parametrize("kind", [turn_grpo.TurnGRPO, gigpo.GiGPO])
def test_episodes_of_one_turn_have_the_advantages_of_grpo(kind):
    settings = config(kind(responses_per_update=6), environment=GAME)
    made = Made(lambda *_: None, lambda *_: None)
    work = StepInput(settings, [], 0, settings.algorithm.initial_state())
    kind.learn(SimpleNamespace(actor=made), work, episodes(turn=0, state=-1))
    score = np.array([[1, 0, 0.25], [2, 0, 1]])
    wanted = (score - score.mean(1, keepdims=True)) / (score.std(1, ddof=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(made.rows("advantage"), np.where(MASK, wanted.reshape(-1, 1), 0), rtol=1e-4, atol=1e-6)


def test_gigpo_refuses_episodes_of_several_turns_without_a_state():
    settings = config(gigpo.GiGPO(responses_per_update=6), environment=GAME)
    made = Made(lambda *_: None, lambda *_: None)

    def learn(turn, state):
        work = StepInput(settings, [], 0, settings.algorithm.initial_state())
        gigpo.learn(SimpleNamespace(actor=made), work, episodes(turn, state))

    learn(turn=0, state=-1)  # all may have ended by their first replies
    learn(turn=1, state=7)
    assert len(made.minibatches) == 2
    with pytest.raises(Refusal, match="set no state in this step"):
        learn(turn=1, state=-1)


def test_self_play_has_a_baseline_for_each_game_and_player():
    turn = np.where(MASK, np.minimum(np.arange(5), 2), -1).astype(np.int16)
    paid = np.zeros(MASK.shape, np.float32)
    paid[0, 0], paid[2, 1], paid[5, 4] = 1, 2, -1
    games = [0, 1, 0, 0, 1, 1]
    record_B = np.array([EpisodeRecord([], [], "done", game) for game in games])
    rows = episodes_of(turn, paid, record_B=record_B)
    rollout = replace(rollout_of(MASK, [0, 0, 0, 1, 1, 1]), episodes=rows)
    scores = Scores(np.float32([1, 0, 2, 0, 3, -1]), np.array([True] * 5 + [False]), {})
    batch = ScoredRollout([], rollout, scores)
    settings = config(rae.RAE(responses_per_update=6, decay=0.75), environment=TOOLS)
    made = Made(lambda *_: None, lambda *_: None)
    state = settings.algorithm.initial_state() | {"baseline/1/1": 2.0}
    result = rae.learn(SimpleNamespace(actor=made), StepInput(settings, [], 0, state), batch)

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


def test_each_player_gains_what_the_other_loses():
    turn = np.array([[0, 0, 1, 2, 3, -1], [0, 1, 1, -1, -1, -1]])
    reward = np.array([[0, 1, 0, 0, 5, 9], [0, 0, -2, 7, 7, 7]], np.float32)
    np.testing.assert_array_equal(rae.player_gains(reward, turn >= 0, turn), [[-4, 4], [2, -2]])


def test_what_has_no_turns_or_no_states_is_refused():
    for algorithm in (turn_grpo.TurnGRPO, gigpo.GiGPO, rae.RAE):
        with pytest.raises(Refusal, match=f"{algorithm.__name__} .* the run has no environment"):
            config(algorithm(responses_per_update=6))
    with pytest.raises(Refusal, match="tools and agent programs have no states"):
        config(gigpo.GiGPO(responses_per_update=6), environment=TOOLS)
    with pytest.raises(Refusal, match="would reward a player for the other's KL"):
        rae.RAE(kl=KLInReward())


def test_the_winner_of_nim_takes_the_last_stick():
    nim = load_module("game_nim")
    game = nim.Nim()
    assert game.reset({"prompt": "6"}, 0).state == 6
    told = [game.step(Reply(text, text)) for text in ("3", "2", "1")]
    assert [(one.state, one.reward, one.done) for one in told] == [(3, 0, False), (1, 0, False), (None, 1, True)]
    game.reset({"prompt": "5"}, 0)
    game.step(Reply("3", "3"))
    assert game.step(Reply("3", "3")) == replace(told[-1], reward=-1.0)
    for record in nim.games("train", 50, 0):
        taken = [int(message["content"]) for message in record["solution"][::2]]
        assert sum(taken) == int(record["prompt"]) and {*taken} <= {1, 2, 3}
