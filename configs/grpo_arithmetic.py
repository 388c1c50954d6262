"""GRPO on generated arithmetic word problems, from random weights: two minutes on a laptop CPU.

    python -m jaxrlhf.train --config grpo_arithmetic.py

More than half of the demonstrations stop one step early. A short supervised cold start imitates them. GRPO compares the
answers to one problem, and so learns that finishing pays. Nothing is downloaded.

Result: 3.1 % of held-out answers are right after the cold start, 98.0 % at the end, in 97 s on two cores of a Xeon.

Source: Shao et al. 2024 (arXiv:2402.03300).
"""

from jaxrlhf.config import (
    GRPO,
    SFT,
    Arithmetic,
    ArithmeticReward,
    ColdStart,
    Config,
    Evaluation,
    FromScratch,
    KLInLoss,
    Optimizer,
    Rewards,
    Rollout,
    Training,
)


def get_config() -> Config:
    """Return the configuration of the run."""
    return Config(
        name="grpo_arithmetic",
        model=FromScratch(),
        data=Arithmetic(difficulty=2, train_problems=12_800, unfinished_share=0.62),
        rewards=Rewards(parts=(ArithmeticReward(),)),
        cold_start=ColdStart(
            steps=200,
            algorithm=SFT(examples_per_update=64),
            optimizer=Optimizer(learning_rate=1.5e-3, warmup_updates=10, weight_decay=0.0),
        ),
        algorithm=GRPO(
            responses_per_update=64,
            kl=KLInLoss(coefficient=0.001, estimator="k3"),
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
