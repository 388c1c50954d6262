"""Classic RLHF pipeline, stage 3 of 3: PPO on the scores of the reward model alone.

    python -m jaxrlhf.train --config rlhf_ppo.py

The policy comes from `rlhf_sft.py`, the reward model from `rlhf_reward_model.py`. A reward with weight 0 measures the
share of right answers, so right answers earn nothing.

Source: Ouyang et al. 2022 (arXiv:2203.02155), step 3.
"""

from jaxrlhf.config import (
    PPO,
    Arithmetic,
    ArithmeticReward,
    Config,
    Evaluation,
    KLInReward,
    ModelReward,
    Optimizer,
    Pretrained,
    Rewards,
    Rollout,
    Training,
)


def get_config() -> Config:
    """Return the configuration of the run."""
    return Config(
        name="rlhf_ppo",
        model=Pretrained("models/rlhf_sft"),
        data=Arithmetic(difficulty=2, train_problems=12_800),
        rewards=Rewards(parts=(ArithmeticReward(weight=0.0), ModelReward("models/rlhf_reward_model"))),
        algorithm=PPO(
            gamma=1.0,
            lam=0.95,
            responses_per_update=64,
            kl=KLInReward(coefficient=0.01, estimator="k1"),
            critic=small_model_training(learning_rate=1e-3),
        ),
        rollout=Rollout(prompts_per_step=64, responses_per_prompt=2, max_prompt_tokens=64, max_response_tokens=32),
        actor=small_model_training(learning_rate=4e-4),
        steps=8,
        evaluation=Evaluation(every_steps=4),
    )


def small_model_training(*, learning_rate: float) -> Training:
    """Return training settings of a small model."""
    return Training(
        optimizer=Optimizer(learning_rate=learning_rate, warmup_updates=4, decay="linear", weight_decay=0.0),
        tokens_per_microbatch=4096,
    )
