"""Supervised fine-tuning on worked solutions of generated arithmetic word problems.

    python -m jaxrlhf.train --config sft_arithmetic.py

The problems are those of `ppo_arithmetic.py`, but all solutions are complete. Nothing is downloaded.

Source: Ouyang et al. 2022 (arXiv:2203.02155), step 1.
"""

from jaxrlhf.config import (
    SFT,
    Arithmetic,
    ArithmeticReward,
    Checkpointing,
    Config,
    Evaluation,
    FromScratch,
    Optimizer,
    Rewards,
    Rollout,
    Training,
)


def get_config() -> Config:
    """Return the configuration of the run; `rewards` and `rollout` are for its evaluation."""
    return Config(
        name="sft_arithmetic",
        model=FromScratch(),
        data=Arithmetic(difficulty=2),
        rewards=Rewards(parts=(ArithmeticReward(),)),
        algorithm=SFT(examples_per_update=64),
        rollout=Rollout(max_prompt_tokens=64, max_response_tokens=32),
        actor=Training(
            optimizer=Optimizer(learning_rate=1e-3, weight_decay=0.0),
            tokens_per_microbatch=8192,
        ),
        steps=300,
        evaluation=Evaluation(every_steps=50),
        checkpoint=Checkpointing(every_steps=50),
    )
