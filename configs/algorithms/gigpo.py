"""GiGPO: GRPO plus credit to turns by state, on a game of several turns: walk to a treasure, step by step.

    python -m jaxrlhf.train --config gigpo.py

Turns of a group that start from equal states, as named by the environment, are compared with each other. This is the
run of `game_treasure.py`; `game_frozen_lake.py` and `game_higher_lower.py` use the algorithm, too.

Source: Feng et al. 2025 (GiGPO, arXiv:2505.10978).
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrlhf import algos
from jaxrlhf.batch import Array
from jaxrlhf.config import GRPO, Config, Environment, Refusal, load, load_module
from jaxrlhf.config.environments import choices
from jaxrlhf.config.refusal import require
from jaxrlhf.config.settings import Finite, NotNegative, Share
from jaxrlhf.dataflows import grpo
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult

turn_grpo = load_module("turn_grpo")


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
    turns = algos.EpisodeTurns(mask_BT, turn_BT)
    anchor_BU = np.asarray(turns.first(anchor_BT))
    alone_BU = -1 - np.arange(anchor_BU.size).reshape(anchor_BU.shape)  # one group for each turn
    state_BU = np.where(anchor_BU < 0, alone_BU, anchor_BU)
    how = {"gamma": gamma, "normalize_std": normalize_std}
    return turns.to_tokens(turn_grpo.compared(turns, reward_BT, group_B, state_BU, **how))


def learn(roles: Roles, work: StepInput["GiGPO"], batch: ScoredRollout) -> StepResult:
    """Learn by GiGPO: the episode's advantage, plus each turn's advantage among the group's turns in the same state."""
    settings = work.settings

    def advantage(returns: grpo.Returns) -> Array:
        episodes, normalize_std = turn_grpo.turns_of(returns), settings.normalize_std
        turn_N, anchor_N = (np.asarray(x)[np.asarray(returns.mask_BT)] for x in (episodes.turn_BT, episodes.anchor_BT))
        # A step may hold first turns alone because every first reply ended its episode.
        if turn_N.max(initial=0) > 0 > anchor_N.max(initial=-1):
            raise Refusal(
                "GiGPO compares turns in equal states, but the environment set no state in this step; set "
                "Opening.state and Observation.state, or choose GRPO or TurnGRPO"
            )
        whole_B = algos.group_relative(*returns.groups, normalize_std=normalize_std)
        turn_BT = state_relative(
            returns.reward_BT,
            returns.mask_BT,
            episodes.turn_BT,
            episodes.anchor_BT,
            returns.prompt_id_B,
            gamma=settings.gamma,
            normalize_std=normalize_std,
        )
        return algos.to_tokens(whole_B, returns.mask_BT) + settings.state_weight * turn_BT

    return grpo.learn(roles, work, batch, advantage)


@dataclass(frozen=True)
class GiGPO(GRPO):
    """Group-in-group policy optimization: GRPO plus credit to turns by state.

    With one turn per episode, or without equal states, it is GRPO.

    Attributes:
      gamma: Discount per turn of the rewards-to-go by which turns are compared.
      state_weight: Weight of a turn's state-level advantage, added to the advantage of its episode.
    """

    learn = learn

    gamma: Share[float] = 0.95
    state_weight: Finite[NotNegative[float]] = 1.0

    def check(self, config: Config) -> None:
        if config.environment is None:
            raise Refusal(
                "GiGPO gives credit to turns of episodes, but the run has no environment; set environment, or choose "
                "GRPO"
            )
        require(
            any(isinstance(one, Environment) for one in choices(config.environment)),
            "GiGPO compares turns in equal states, but tools and agent programs have no states; use an Environment "
            "that sets Observation.state, or choose GRPO or TurnGRPO",
        )


def get_config() -> Config:
    """Return the configuration of the run."""
    return replace(load("game_treasure"), name="gigpo")
