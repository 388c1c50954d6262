"""DAPO on generated arithmetic word problems, from a model that knows nothing: minutes on a laptop CPU.

    python -m jaxrlhf.train --config dapo_arithmetic.py

As `grpo_arithmetic.py`, but a step goes on drawing problems until it has 16 on which the answers
disagree, answers near the length limit are punished, and nothing holds the policy to a reference.
Nothing is downloaded.

Source: Yu et al. 2025 (DAPO, arXiv:2503.14476).
"""

from jaxrlhf.config import (
    DAPO,
    SFT,
    Arithmetic,
    ArithmeticReward,
    ColdStart,
    Config,
    Evaluation,
    FromScratch,
    Optimizer,
    Rewards,
    Rollout,
    Training,
)


def get_config() -> Config:
    """The run."""
    return Config(
        name="dapo_arithmetic",
        model=FromScratch(),
        data=Arithmetic(difficulty=2, train_problems=12_800, unfinished_share=0.62),
        rewards=Rewards(parts=(ArithmeticReward(),)),
        cold_start=ColdStart(
            steps=200,
            algorithm=SFT(examples_per_update=64),
            optimizer=Optimizer(learning_rate=1.5e-3, warmup_updates=10, weight_decay=0.0),
        ),
        algorithm=DAPO(
            responses_per_update=32,
            max_rounds=5,
        ),
        rollout=Rollout(
            prompts_per_step=16,
            responses_per_prompt=8,
            max_prompt_tokens=64,
            max_response_tokens=40,
        ),
        actor=Training(
            optimizer=Optimizer(learning_rate=3e-4, warmup_updates=4, decay="linear", weight_decay=0.0),
            tokens_per_microbatch=4096,
        ),
        steps=20,
        evaluation=Evaluation(every_steps=5),
    )
