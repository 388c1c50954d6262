"""Turn-level credit assignment in episodes: a turn is one action, and all its tokens get the turn's advantage."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrlhf.algos.advantages import Targets, discounted_returns, gae, group_relative
from jaxrlhf.batch import Array


def turn_gae(
    reward_BT: Float[Array, "B T"],
    value_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    turn_BT: Int[Array, "B T"],
    *,
    gamma: float,
    lam: float | Float[Array, ""] | Float[Array, "B"],
) -> Targets:
    """Compute generalized advantage estimation (GAE) over turns; every token gets its turn's advantage and return.

    A turn's reward is the sum of its tokens' rewards, and its value is the critic's value before its first token. If
    every turn is one token, the result is that of `gae`.

    Args:
      reward_BT, value_BT: Rewards and values of tokens, as in `gae`.
      turn_BT: Turn of each action token, from 0.
      gamma: Discount per turn, in [0, 1].
      lam: GAE's lambda: 0 is one-step TD, 1 is Monte Carlo.

    Source: Zhou et al. 2024 (ArCHer, arXiv:2402.19446), section 3, for utterances as actions.
    """
    turns = _Turns(mask_BT, turn_BT)
    targets = gae(turns.summed(reward_BT), turns.first(value_BT), turns.taken_BU, gamma=gamma, lam=lam)
    return Targets(*(turns.to_tokens(target_BU) for target_BU in targets))


def turn_relative(
    reward_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    turn_BT: Int[Array, "B T"],
    group_B: Int[Array, "B"],
    *,
    gamma: float,
    normalize_std: bool,
) -> Float[Array, "B T"]:
    """Compute each turn's reward to go, relative to the same turn in the group's other episodes.

        A_u = (R_u - mean_g(R_u)) / (std_g(R_u) + 1e-6)

    A turn that only one episode of the group reached gives 0.

    Args:
      mask_BT: Action tokens of scorable episodes.
      group_B: Group ids; episodes of a group started from the same prompt.
      gamma: Discount per turn, in [0, 1].
      normalize_std: True to divide by the standard deviation.

    Source: Zeng et al. 2025 (arXiv:2505.11821), section 4, with the rewards of all later turns.
    """
    turns = _Turns(mask_BT, turn_BT)
    place_BU = np.broadcast_to(np.arange(turns.taken_BU.shape[1]), turns.taken_BU.shape)
    return turns.to_tokens(turns.compared(reward_BT, (group_B, place_BU), gamma=gamma, normalize_std=normalize_std))


def state_relative(
    reward_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    turn_BT: Int[Array, "B T"],
    anchor_BT: Int[Array, "B T"],
    group_B: Int[Array, "B"],
    *,
    gamma: float,
    normalize_std: bool,
) -> Float[Array, "B T"]:
    """Compute each turn's reward to go, relative to the group's turns that were taken in the same state.

    This is GiGPO's step advantage, to be added to the episode's advantage. A state in which the group took only one
    turn gives 0.

    Args:
      anchor_BT: Number of the state in which a token's turn was taken; a turn with -1 gets 0.

    Source: Feng et al. 2025 (GiGPO, arXiv:2505.10978), eq. 6 to 8.
    """
    turns = _Turns(mask_BT, turn_BT)
    anchor_BU = np.asarray(turns.first(anchor_BT))
    alone_BU = -1 - np.arange(anchor_BU.size).reshape(anchor_BU.shape)  # a group of its own
    state_BU = np.where(anchor_BU < 0, alone_BU, anchor_BU)
    return turns.to_tokens(turns.compared(reward_BT, (group_B, state_BU), gamma=gamma, normalize_std=normalize_std))


def turn_counts(mask_BT: Bool[Array, "B T"], turn_BT: Int[Array, "B T"]) -> Int[np.ndarray, "B"]:
    """Count the turns of each episode in which the policy chose a token."""
    return np.count_nonzero(_Turns(mask_BT, turn_BT).taken_BU, axis=1)


def player_gains(
    reward_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"], turn_BT: Int[Array, "B T"]
) -> Float[np.ndarray, "B 2"]:
    """Compute the return of each player of a zero-sum game: its own turns' rewards minus the other player's.

    Args:
      turn_BT: Turn of each action token, from 0; even turns are the first player's.
    """
    odd_BT = np.where(mask_BT, turn_BT, 0) % 2 == 1
    paid_BP = np.stack([np.where(mask_BT & (odd_BT == odd), reward_BT, 0).sum(axis=1) for odd in (False, True)], axis=1)
    return paid_BP - paid_BP[:, ::-1]


class _Turns:
    """Turns of a batch of episodes, with at most U turns each.

    Attributes:
      taken_BU: bool, True for turns with an action token.
    """

    def __init__(self, mask_BT: Array, turn_BT: Array) -> None:
        self._mask_BT = np.asarray(mask_BT)
        self._turn_BT = np.where(self._mask_BT, np.asarray(turn_BT), -1)
        turns = int(self._turn_BT.max(initial=0)) + 1
        self._shape = len(self._turn_BT), turns
        self._row_N, self._column_N = np.nonzero(self._mask_BT)
        self._number_N = self._turn_BT[self._row_N, self._column_N]
        self.taken_BU = np.zeros(self._shape, bool)
        self.taken_BU[self._row_N, self._number_N] = True

    def summed(self, value_BT: Array) -> np.ndarray:
        """Sum over the tokens of each turn."""
        sum_BU = np.zeros(self._shape, np.float32)
        np.add.at(sum_BU, (self._row_N, self._number_N), np.asarray(value_BT)[self._row_N, self._column_N])
        return sum_BU

    def first(self, value_BT: Array) -> np.ndarray:
        """Return the value at the first token of each turn; 0 for turns that were not taken."""
        value_BT = np.asarray(value_BT)
        first_BU = np.zeros(self._shape, value_BT.dtype)
        # From the last token to the first, so that the first token's value is written last.
        rows, columns, numbers = (array[::-1] for array in (self._row_N, self._column_N, self._number_N))
        first_BU[rows, numbers] = value_BT[rows, columns]
        return first_BU

    def to_tokens(self, value_BU: Array) -> Array:
        """Return the value of each token's turn; 0 outside the mask."""
        taken_BT = np.maximum(self._turn_BT, 0)
        return jnp.where(self._mask_BT, np.take_along_axis(np.asarray(value_BU), taken_BT, axis=1), 0)

    def compared(
        self, reward_BT: Array, group: tuple[Array, np.ndarray], *, gamma: float, normalize_std: bool
    ) -> np.ndarray:
        """Compute each turn's reward to go relative to comparable turns.

        Args:
          group: Number of each episode's group, and number of each turn's kind; turns with both numbers equal are
            compared.
        """
        return_BU = discounted_returns(self.summed(reward_BT), self.taken_BU, gamma=gamma)
        group_B, kind_BU = group
        group_BU = np.broadcast_to(np.asarray(group_B)[:, None], self._shape)
        _, number_N = np.unique(np.stack([group_BU.ravel(), kind_BU.ravel()]), axis=1, return_inverse=True)
        compared_N = group_relative(
            np.asarray(return_BU).ravel(), self.taken_BU.ravel(), number_N.ravel(), normalize_std=normalize_std
        )
        return np.asarray(compared_N).reshape(self._shape)
