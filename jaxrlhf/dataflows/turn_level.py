"""Turn-level advantages of episodes: turns are compared by turn number, by state, or by player."""

from dataclasses import replace

import numpy as np

from jaxrlhf import algos
from jaxrlhf.batch import Array, EpisodeRows
from jaxrlhf.config import RAE, GiGPO, Refusal, TurnGRPO
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.grpo import Returns, learn
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult


def turn_grpo(roles: Roles, work: StepInput[TurnGRPO], batch: ScoredRollout) -> StepResult:
    """Learn by turn-level GRPO: rewards to go of a turn, relative to the group's episodes in the same turn."""
    settings = work.settings

    def advantage(returns: Returns) -> Array:
        return algos.turn_relative(
            returns.reward_BT,
            returns.mask_BT,
            _turns(returns).turn_BT,
            returns.prompt_id_B,
            gamma=settings.gamma,
            normalize_std=settings.normalize_std,
        )

    return learn(roles, work, batch, advantage)


def gigpo(roles: Roles, work: StepInput[GiGPO], batch: ScoredRollout) -> StepResult:
    """Learn by GiGPO: the episode's advantage, plus each turn's advantage among the group's turns in the same state."""
    settings = work.settings

    def advantage(returns: Returns) -> Array:
        episodes, normalize_std = _turns(returns), settings.normalize_std
        turn_N, anchor_N = (np.asarray(x)[np.asarray(returns.mask_BT)] for x in (episodes.turn_BT, episodes.anchor_BT))
        # A step may hold first turns alone because every first reply ended its episode.
        if turn_N.max(initial=0) > 0 > anchor_N.max(initial=-1):
            raise Refusal(
                "GiGPO compares turns that were made in one state, and the environment named none in this step; set "
                "Opening.state and Observation.state, or choose GRPO or TurnGRPO"
            )
        whole_B = algos.group_relative(*returns.groups, normalize_std=normalize_std)
        turn_BT = algos.state_relative(
            returns.reward_BT,
            returns.mask_BT,
            episodes.turn_BT,
            episodes.anchor_BT,
            returns.prompt_id_B,
            gamma=settings.gamma,
            normalize_std=normalize_std,
        )
        return algos.to_tokens(whole_B, returns.mask_BT) + settings.state_weight * turn_BT

    return learn(roles, work, batch, advantage)


def rae(roles: Roles, work: StepInput[RAE], batch: ScoredRollout) -> StepResult:
    """Learn by REINFORCE for self-play: a player's return minus the moving average of the player's role in the game.

        b <- decay * b + (1 - decay) * mean(R),  A = R - b

    Source: Liu et al. 2025 (SPIRAL, arXiv:2506.24119), section 3.3, with the mean over a step's episodes of a game.
    """
    assert batch.record_E is not None, "a run without an environment is refused with the configuration"
    game_E, baselines = np.array([record.environment for record in batch.record_E]), dict[str, float]()

    def advantage(returns: Returns) -> Array:
        turn_BT, mask_BT = np.asarray(_turns(returns).turn_BT), np.asarray(returns.mask_BT)
        gain_BP = algos.player_gains(returns.reward_BT, mask_BT, turn_BT)
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

    result = learn(roles, work, batch, advantage)
    return replace(result, state=result.state | baselines)


def _turns(returns: Returns) -> EpisodeRows:
    assert returns.episodes is not None, "a run without an environment is refused with the configuration"
    return returns.episodes
