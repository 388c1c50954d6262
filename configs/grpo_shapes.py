"""GRPO on drawn pictures, with a vision tower and a decoder from random weights: minutes on a laptop CPU.

    python -m jaxrlhf.train --config grpo_shapes.py

A question asks for the digit of one color among three, or for the two digits of a row. More than half of the
demonstrations are hasty: they read the digit of another color, or the row from right to left, and their first word says
so. A supervised cold start imitates all demonstrations. From the rewards, GRPO learns which way of reading is right,
and to see better. The vision tower is trained, too. Nothing is downloaded.

Result: 14 to 15 % of held-out questions are answered after the cold start, 97 to 99 % at the end (three seeds).

Source: Shao et al. 2024 (arXiv:2402.03300).
"""

from jaxrlhf.config import (
    GRPO,
    SFT,
    ArithmeticReward,
    ColdStart,
    Config,
    Evaluation,
    FromScratch,
    KLInLoss,
    Optimizer,
    Rewards,
    Rollout,
    Shapes,
    Tower,
    Training,
)


def get_config() -> Config:
    """Return the configuration of the run."""
    return Config(
        name="grpo_shapes",
        model=FromScratch(
            hidden_size=96,
            intermediate_size=256,
            num_layers=2,
            num_heads=4,
            num_kv_heads=4,
            head_dim=24,
            vision=Tower(),
        ),
        data=Shapes(train_problems=25_600, hasty_share=0.6),
        rewards=Rewards(parts=(ArithmeticReward(),)),
        cold_start=ColdStart(
            steps=800,
            algorithm=SFT(examples_per_update=64),
            optimizer=Optimizer(
                learning_rate=1e-3, vision_learning_rate=1e-3, warmup_updates=10, decay="linear", weight_decay=0.0
            ),
        ),
        algorithm=GRPO(responses_per_update=64, kl=KLInLoss(coefficient=0.001, estimator="k3")),
        rollout=Rollout(prompts_per_step=32, responses_per_prompt=8, max_prompt_tokens=32, max_response_tokens=16),
        actor=Training(
            optimizer=Optimizer(
                learning_rate=3e-4, vision_learning_rate=3e-4, warmup_updates=4, decay="linear", weight_decay=0.0
            ),
            tokens_per_microbatch=1024,
        ),
        steps=20,
        evaluation=Evaluation(every_steps=4),
    )
