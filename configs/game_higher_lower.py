"""GiGPO on a game of several turns, from random weights: guess a number from 1 to 7 in three guesses.

    python -m jaxrlhf.train --config game_higher_lower.py

After each guess the policy sees the range of numbers that are left. The demonstrations guess at random in this range,
which finds 67.8 % of the numbers; guessing the middle always finds the number. The reward is 1 for finding the number.
GiGPO compares guesses in the same range.

Result: 70 and 65 % of the sampled games find the number in the first training step, 99.4 % in the last (seeds 0 and 1).

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
        name="game_higher_lower",
        model=FromScratch(),
        data=Generated("jaxrlhf.data.generated:secrets", train_problems=12_800),
        environment=Environment(
            factory="jaxrlhf.environments.games:HigherLower", episodes_per_process=8, max_turns=3, turn_tokens=3
        ),
        rewards=Rewards(parts=()),
        cold_start=ColdStart(
            steps=100,
            algorithm=SFT(examples_per_update=64),
            optimizer=Optimizer(learning_rate=1.5e-3, warmup_updates=10, weight_decay=0.0),
        ),
        algorithm=load_module("gigpo").GiGPO(responses_per_update=256),
        rollout=Rollout(prompts_per_step=128, responses_per_prompt=8, max_prompt_tokens=16, max_response_tokens=24),
        actor=Training(
            optimizer=Optimizer(learning_rate=1e-3, warmup_updates=4, decay="linear", weight_decay=0.0),
            tokens_per_microbatch=4096,
        ),
        steps=20,
        evaluation=Evaluation(every_steps=5),
    )
