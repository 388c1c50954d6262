"""RLOO on generated arithmetic word problems, from a model that knows nothing: minutes on a laptop CPU.

    python -m jaxrlhf.train --config rloo_arithmetic.py

As `grpo_arithmetic.py`, but a response is compared with the mean of the others to its problem, and
the divergence from the reference policy is charged in the reward. Nothing is downloaded.

Source: Ahmadian et al. 2024 (arXiv:2402.14740).
"""

from jaxrlhf.config import (
    RLOO,
    SFT,
    Arithmetic,
    ArithmeticReward,
    ColdStart,
    Config,
    Evaluation,
    FromScratch,
    KLInReward,
    Optimizer,
    Rewards,
    Rollout,
    Training,
)


def get_config() -> Config:
    """The run."""
    return Config(
        name="rloo_arithmetic",
        model=FromScratch(),
        data=Arithmetic(difficulty=2, train_problems=12_800, unfinished_share=0.62),
        rewards=Rewards(parts=(ArithmeticReward(),)),
        cold_start=ColdStart(
            steps=200,
            algorithm=SFT(examples_per_update=64),
            optimizer=Optimizer(learning_rate=1.5e-3, warmup_updates=10, weight_decay=0.0),
        ),
        algorithm=RLOO(
            responses_per_update=64,
            kl=KLInReward(coefficient=0.001, estimator="k1"),
        ),
        rollout=Rollout(
            prompts_per_step=32,
            responses_per_prompt=8,
            max_prompt_tokens=64,
            max_response_tokens=32,
        ),
        actor=Training(
            optimizer=Optimizer(learning_rate=3e-4, warmup_updates=4, decay="linear", weight_decay=0.0),
            tokens_per_microbatch=4096,
        ),
        steps=20,
        evaluation=Evaluation(every_steps=5),
    )
