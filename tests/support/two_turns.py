"""A configuration file with an environment of two turns: the policy answers, is told something, and answers again.

Both answers are trained on, in one sequence; what the environment said is not.
"""

from dataclasses import dataclass, replace

import numpy as np
import tiny_runs

from jaxrlhf.batch import RolloutBatch
from jaxrlhf.config import GRPO, Config
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import value_of

SAID = (5, 6, 7)


def two_turns(roles, work):
    """Collect scored responses of two turns to the step's problems."""
    rollout, problems = work.config.rollout, work.problems
    sampled = {"responses_per_prompt": rollout.responses_per_prompt, "seed": work.seed}
    first = value_of(roles.actor.generate_sequences(problems, rollout.sampling, **sampled))
    own = [problem for problem in problems for _ in range(rollout.responses_per_prompt)]
    told = [
        replace(problem, prompt_id=row, prompt_tokens=(*first.sequences.token_BT[row, :length].tolist(), *SAID))
        for row, (problem, length) in enumerate(zip(own, first.sequences.length_B, strict=True))
    ]
    again = roles.actor.generate_sequences(told, rollout.sampling, responses_per_prompt=1, seed=work.seed + 1)
    both = joined(first, value_of(again))
    return ScoredRollout(problems, both, roles.reward.compute_reward(problems, both))


def joined(first: RolloutBatch, second: RolloutBatch) -> RolloutBatch:
    """Sequences of the second turn, which begin with those of the first, with what was sampled in either."""
    earlier_BT = first.sequences.mask_BT
    sequences = second.sequences.replace(
        mask_BT=earlier_BT | second.sequences.mask_BT, prompt_id_B=first.sequences.prompt_id_B
    )
    logp_BT = np.where(earlier_BT, first.sampler_logp_BT, second.sampler_logp_BT)
    version_BT = np.where(earlier_BT, first.version_BT, second.version_BT)
    return second.replace(sequences=sequences, sampler_logp_BT=logp_BT, version_BT=version_BT)


@dataclass(frozen=True)
class TwoTurns(GRPO):
    collect = two_turns


def get_config() -> Config:
    config = tiny_runs.get_config()
    return replace(
        config,
        cold_start=None,
        algorithm=TwoTurns(responses_per_update=16, old_logp="trainer"),
        rollout=replace(config.rollout, max_prompt_tokens=128, max_response_tokens=8),
        steps=2,
    )
