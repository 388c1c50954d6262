"""GiGPO on a game of several turns, from random weights: walk to a treasure, step by step.

    python -m jaxrlhf.train --config game_treasure.py

The policy sees its place on a path of nine places, and the place of the treasure, five to eight steps away. It has ten
steps. In the demonstrations, six of ten steps go towards the treasure. The reward is 1 for reaching the treasure. GiGPO
compares steps that were made at the same place.

Result: 15 to 19 % of the sampled games reach the treasure in the first training step, more than 99 % from step 6 on
(three seeds).

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
    Optimizer,
    Rewards,
    Rollout,
    Training,
    load_module,
)


def get_config() -> Config:
    """Return the configuration of the run."""
    return Config(
        name="game_treasure",
        model=FromScratch(),
        data=Generated("jaxrlhf.data.generated:treasures", train_problems=12_800),
        environment=Environment(factory="jaxrlhf.environments.games:Treasure", max_turns=10, turn_tokens=3),
        rewards=Rewards(parts=()),
        cold_start=ColdStart(
            steps=60,
            algorithm=SFT(examples_per_update=64),
            optimizer=Optimizer(learning_rate=1.5e-3, warmup_updates=10, weight_decay=0.0),
        ),
        algorithm=load_module("gigpo").GiGPO(responses_per_update=64),
        rollout=Rollout(prompts_per_step=32, responses_per_prompt=8, max_prompt_tokens=16, max_response_tokens=96),
        actor=Training(
            optimizer=Optimizer(learning_rate=5e-4, warmup_updates=4, weight_decay=0.0), tokens_per_microbatch=4096
        ),
        steps=12,
        evaluation=Evaluation(every_steps=4),
    )
