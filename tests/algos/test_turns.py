"""Credit over turns equals naive loops, hand tables, and GAE where a turn is one token."""

import numpy as np
import pytest

from jaxrlhf import algos


@pytest.fixture(scope="module")
def episodes():
    """Rewards, values, mask and turns of five episodes with up to four turns between observations."""
    random = np.random.default_rng(0)
    mask_BT, turn_BT = np.zeros((5, 24), bool), np.full((5, 24), -1, np.int16)
    for row in range(5):
        place = 2
        for turn in range(row % 4 + 1):
            length = int(random.integers(1, 4))
            mask_BT[row, place : place + length], turn_BT[row, place : place + length] = True, turn
            place += length + int(random.integers(1, 3))
    reward_BT, value_BT = random.normal(size=(2, 5, 24)).astype(np.float32)
    return reward_BT, value_BT, mask_BT, turn_BT


def naive_turn_gae(reward_T, value_T, mask_T, turn_T, gamma, lam):
    """Advantage and return of each token of one episode, turn by turn from the last."""
    advantage_T, return_T = np.zeros(len(mask_T)), np.zeros(len(mask_T))
    following_value = following_advantage = 0.0
    for turn in reversed(range(turn_T[mask_T].max() + 1)):
        places = [t for t in range(len(mask_T)) if mask_T[t] and turn_T[t] == turn]
        value = value_T[places[0]]
        delta = sum(reward_T[t] for t in places) + gamma * following_value - value
        following_advantage = delta + gamma * lam * following_advantage
        following_value = value
        for t in places:
            advantage_T[t], return_T[t] = following_advantage, following_advantage + value
    return advantage_T, return_T


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.0), (0.8, 0.7)])
def test_turn_gae_is_gae_with_turns_as_actions(episodes, gamma, lam):
    reward_BT, value_BT, mask_BT, turn_BT = episodes
    targets = algos.turn_gae(reward_BT, value_BT, mask_BT, turn_BT, gamma=gamma, lam=lam)
    for row in range(len(mask_BT)):
        rows = (array[row] for array in (reward_BT, value_BT, mask_BT, turn_BT))
        advantage_T, return_T = naive_turn_gae(*rows, gamma, lam)
        np.testing.assert_allclose(targets.advantage_BT[row], advantage_T, atol=1e-5)
        np.testing.assert_allclose(targets.return_BT[row], return_T, atol=1e-5)


def test_turn_gae_of_turns_of_one_token_is_gae(episodes):
    reward_BT, value_BT, mask_BT, _ = episodes
    turn_BT = np.where(mask_BT, np.cumsum(mask_BT, axis=1) - 1, -1)
    ours = algos.turn_gae(reward_BT, value_BT, mask_BT, turn_BT, gamma=0.9, lam=0.8)
    theirs = algos.gae(reward_BT, value_BT, mask_BT, gamma=0.9, lam=0.8)
    np.testing.assert_allclose(ours.advantage_BT, theirs.advantage_BT, atol=1e-6)
    np.testing.assert_allclose(ours.return_BT, theirs.return_BT, atol=1e-6)
