"""RAE: self-play of zero-sum games with a baseline for each player, on a game of Nim.

    python -m jaxrlhf.train --config rae.py

One policy plays both sides. This is the run of `game_nim.py`, which has its result.

Source: Liu et al. 2025 (SPIRAL, arXiv:2506.24119).
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrlhf.batch import Array
from jaxrlhf.config import Config, KLInReward, PolicyGradient, load
from jaxrlhf.config.refusal import require
from jaxrlhf.config.settings import Share
from jaxrlhf.dataflows import grpo
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult, value_of


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


def learn(roles: Roles, work: StepInput["RAE"], batch: ScoredRollout) -> StepResult:
    """Learn by REINFORCE for self-play: a player's return minus the moving average of the player's role in the game.

        b <- decay * b + (1 - decay) * mean(R),  A = R - b

    Source: Liu et al. 2025 (SPIRAL, arXiv:2506.24119), section 3.3, with the mean over a step's episodes of a game.
    """
    records = value_of(batch.rollout).episodes.records
    game_E, baselines = np.array([record.environment for record in records]), dict[str, float]()

    def advantage(returns: grpo.Returns) -> Array:
        assert returns.episodes is not None
        turn_BT, mask_BT = np.asarray(returns.episodes.turn_BT), np.asarray(returns.mask_BT)
        gain_BP = player_gains(returns.reward_BT, mask_BT, turn_BT)
        for game in np.unique(game_E):
            played_E = game_E == game
            for player in range(2):
                gains = gain_BP[played_E & np.asarray(returns.scorable_B), player]
                name, decay = f"baseline/{game}/{player}", work.settings.decay
                before = work.state.get(name, 0.0)
                baselines[name] = decay * before + (1 - decay) * float(gains.mean()) if len(gains) else before
                gain_BP[played_E, player] -= baselines[name]
        player_BT = np.where(mask_BT, turn_BT, 0) % 2
        return np.where(mask_BT, np.take_along_axis(gain_BP, player_BT, axis=1), 0).astype(np.float32)

    result = grpo.learn(roles, work, batch, advantage)
    return replace(result, state=result.state | baselines)


@dataclass(frozen=True)
class RAE(PolicyGradient):
    """Self-play of zero-sum games with a baseline for each player.

    One policy plays both sides: turns 0, 2, ... of an episode are the first player's, turns 1, 3, ... the second's. A
    reward of the environment for a turn counts for the player of that turn and against the other player; the rest of
    the score belongs to the last turn. Each player of each game has its own baseline, a moving average.

    Attributes:
      decay: Decay of the baselines per step.
    """

    learn = learn

    decay: Share[float] = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not isinstance(self.kl, KLInReward),
            f"RAE subtracts the rewards of the other player, so kl={self.kl} would reward a player for the other's "
            "KL; use KLInLoss",
        )

    def check(self, config: Config) -> None:
        require(
            config.environment is not None,
            "RAE plays games with turns, but the run has no environment; set environment, or choose ReinforcePlusPlus",
        )


def get_config() -> Config:
    """Return the configuration of the run."""
    return replace(load("game_nim"), name="rae")
