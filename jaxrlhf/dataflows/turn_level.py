"""GRPO with credit for the turns of an episode: by the same turn, or by the same state."""

from jaxrlhf import algos
from jaxrlhf.batch import Array, EpisodeRows
from jaxrlhf.config import GiGPO, TurnGRPO
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.grpo import Returns, learn
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult


def turn_grpo(roles: Roles, work: StepInput[TurnGRPO], batch: ScoredRollout) -> StepResult:
    """Turn-level GRPO: rewards to go of a turn, relative to the group's episodes in that turn."""
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
    """GiGPO: the episode's advantage, plus that of each turn among the group's turns in the same state."""
    settings = work.settings

    def advantage(returns: Returns) -> Array:
        episodes, normalize_std = _turns(returns), settings.normalize_std
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


def _turns(returns: Returns) -> EpisodeRows:
    assert returns.episodes is not None, "a run without an environment is refused with the configuration"
    return returns.episodes
