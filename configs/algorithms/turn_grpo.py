"""GRPO over turns, on a game of several turns: walk to a treasure, step by step.

    python -m jaxrlhf.train --config turn_grpo.py

Each turn has its own advantage: its reward to go, relative to the same turn of the group's other episodes. All other
settings are those of `game_treasure.py`.

Source: Zeng et al. 2025 (arXiv:2505.11821), section 4.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrlhf import algos
from jaxrlhf.batch import Array, EpisodeRows
from jaxrlhf.config import GRPO, Config, load
from jaxrlhf.config.refusal import require
from jaxrlhf.config.settings import Share
from jaxrlhf.dataflows import grpo
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult


def compared(
    turns: algos.EpisodeTurns,
    reward_BT: Float[Array, "B T"],
    group_B: Int[Array, "B"],
    kind_BU: Int[Array, "B U"],
    *,
    gamma: float,
    normalize_std: bool,
) -> Float[np.ndarray, "B U"]:
    """Compute each turn's reward to go, relative to the turns of its group that are of the same kind.

    Args:
      group_B: Number of each episode's group.
      kind_BU: Number of each turn's kind.
      gamma: Discount per turn.
    """
    return_BU = np.asarray(algos.discounted_returns(turns.summed(reward_BT), turns.taken_BU, gamma=gamma))
    group_BU = np.broadcast_to(np.asarray(group_B)[:, None], return_BU.shape)
    _, number_N = np.unique(np.stack([group_BU.ravel(), kind_BU.ravel()]), axis=1, return_inverse=True)
    scored = return_BU.ravel(), turns.taken_BU.ravel(), number_N.ravel()
    return np.asarray(algos.group_relative(*scored, normalize_std=normalize_std)).reshape(return_BU.shape)


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
    turns = algos.EpisodeTurns(mask_BT, turn_BT)
    place_BU = np.broadcast_to(np.arange(turns.taken_BU.shape[1]), turns.taken_BU.shape)
    return turns.to_tokens(compared(turns, reward_BT, group_B, place_BU, gamma=gamma, normalize_std=normalize_std))


def turns_of(returns: grpo.Returns) -> EpisodeRows:
    """Return the turns of a step's episodes."""
    assert returns.episodes is not None, "check() refuses a run without an environment"
    return returns.episodes


def learn(roles: Roles, work: StepInput["TurnGRPO"], batch: ScoredRollout) -> StepResult:
    """Learn by GRPO over turns."""
    settings = work.settings

    def advantage(returns: grpo.Returns) -> Array:
        return turn_relative(
            returns.reward_BT,
            returns.mask_BT,
            turns_of(returns).turn_BT,
            returns.prompt_id_B,
            gamma=settings.gamma,
            normalize_std=settings.normalize_std,
        )

    return grpo.learn(roles, work, batch, advantage)


@dataclass(frozen=True)
class TurnGRPO(GRPO):
    """GRPO per turn: the reward to go of a turn is compared with the same turn in the group's other episodes.

    Attributes:
      gamma: Discount per turn.
    """

    learn = learn

    gamma: Share[float] = 1.0

    def check(self, config: Config) -> None:
        require(
            config.environment is not None,
            f"{type(self).__name__} gives credit to turns of episodes, but the run has no environment; set "
            "environment, or choose GRPO",
        )


def get_config() -> Config:
    """Return the configuration of the run."""
    return replace(load("game_treasure"), name="turn_grpo", algorithm=TurnGRPO(responses_per_update=64))
