"""Turn-level credit assignment in episodes: a turn is one action, and all its tokens get the turn's advantage."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrlhf.algos.advantages import Targets, gae
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
    turns = EpisodeTurns(mask_BT, turn_BT)
    targets = gae(turns.summed(reward_BT), turns.first(value_BT), turns.taken_BU, gamma=gamma, lam=lam)
    return Targets(*(turns.to_tokens(target_BU) for target_BU in targets))


def turn_counts(mask_BT: Bool[Array, "B T"], turn_BT: Int[Array, "B T"]) -> Int[np.ndarray, "B"]:
    """Count the turns of each episode in which the policy chose a token."""
    return np.count_nonzero(EpisodeTurns(mask_BT, turn_BT).taken_BU, axis=1)


class EpisodeTurns:
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
