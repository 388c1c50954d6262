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


def test_turns_are_compared_with_the_same_turn_of_the_group():
    """Two groups; of the first, one episode has a turn that no other reached."""
    turn_BT = np.array([[0, 1, 2], [0, 1, -1], [0, -1, -1], [0, 1, -1]])
    reward_BT = np.array([[0.0, 0, 4], [0, 2, 0], [5, 0, 0], [0, 1, 0]], np.float32)
    group_B = np.array([7, 7, 9, 9])
    relative = algos.turn_relative(reward_BT, turn_BT >= 0, turn_BT, group_B, gamma=1.0, normalize_std=False)
    assert np.asarray(relative).tolist() == [[1, 1, 0], [-1, -1, 0], [2, 0, 0], [-2, 0, 0]]


def test_states_are_compared_within_a_group_as_gigpo_has_it():
    """Hand table: returns 0.5 and 1 from state A of the first episode and 2 from that of the second; B is alone."""
    turn_BT = np.array([[0, -1, 1, 1], [0, 0, -1, -1], [0, -1, -1, -1]])
    anchor_BT = np.array([[5, -1, 5, 5], [5, 5, -1, -1], [5, -1, -1, -1]])
    reward_BT = np.array([[0.0, 0, 0.25, 0.75], [0, 2, 0, 0], [3, 0, 0, 0]], np.float32)
    group_B = np.array([0, 0, 1])
    how = {"gamma": 0.5, "normalize_std": False}
    relative = np.asarray(algos.state_relative(reward_BT, turn_BT >= 0, turn_BT, anchor_BT, group_B, **how))
    mean = (0.5 + 1 + 2) / 3
    expected = [[0.5 - mean, 0, 1 - mean, 1 - mean], [2 - mean, 2 - mean, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(relative, expected, atol=1e-6)


def test_turns_without_a_named_state_are_compared_with_nothing(episodes):
    reward_BT, _, mask_BT, turn_BT = episodes
    nowhere_BT, group_B = np.full(mask_BT.shape, -1), np.zeros(len(mask_BT), int)
    how = {"gamma": 0.9, "normalize_std": True}
    assert not np.any(algos.state_relative(reward_BT, mask_BT, turn_BT, nowhere_BT, group_B, **how))
