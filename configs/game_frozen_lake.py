"""A game of gymnasium's, from random weights: cross the frozen lake.

    pip install 'jaxrlhf[environments]' && python -m jaxrlhf.train --config game_frozen_lake.py

The policy is told the cell that it stands on, and says L, D, R or U. Seven of ten steps of its demonstrations go right
or down, towards the goal, and know nothing of the holes. The shortest way has six steps. GiGPO compares steps that were
made from one cell.

Result: 7, 4 and 3 % of sampled games cross it in the first step, 100, 91 and 98 % in step 12, seeds 0, 1 and 2.

Source: Feng et al. 2025 (GiGPO, arXiv:2505.10978).
"""

from jaxrlhf.config import (
    SFT,
    ColdStart,
    Config,
    Environment,
    Evaluation,
    FromScratch,
    Generated,
    GiGPO,
    Optimizer,
    Rewards,
    Rollout,
    Training,
)


def get_config() -> Config:
    """The run."""
    return Config(
        name="game_frozen_lake",
        model=FromScratch(),
        data=Generated("jaxrlhf.data.generated:lake_walks", train_problems=12_800),
        environment=Environment(factory="jaxrlhf.environments.games:lake", max_turns=12, turn_tokens=3),
        rewards=Rewards(parts=()),
        cold_start=ColdStart(
            steps=60,
            algorithm=SFT(examples_per_update=64),
            optimizer=Optimizer(learning_rate=1.5e-3, warmup_updates=10, weight_decay=0.0),
        ),
        algorithm=GiGPO(responses_per_update=64),
        rollout=Rollout(prompts_per_step=32, responses_per_prompt=8, max_prompt_tokens=16, max_response_tokens=96),
        actor=Training(
            optimizer=Optimizer(learning_rate=5e-4, warmup_updates=4, weight_decay=0.0), tokens_per_microbatch=4096
        ),
        steps=12,
        evaluation=Evaluation(every_steps=4),
    )
