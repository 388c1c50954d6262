"""Helpfulness, stage 2 of 2: PPO on the scores of the reward model, four models of 7B on a machine of eight H100.

    python -m jaxrlhf.train --config hh_ppo.py

The reward model comes from `hh_reward_model.py`, and the critic starts from its weights. Prompts are the conversations
of hh-rlhf, without the last answer.

Planned: Qwen2.5-7B-Instruct on h100x1x8 52 of 75 GiB of a device, 109 s a step, 2.5 h.

Source: batches, learning rates and KL of OpenRLHF's example (https://github.com/OpenRLHF/OpenRLHF; Hu et al. 2024,
arXiv:2405.11143); the conversations are Bai et al. 2022 (arXiv:2204.05862).
"""

from jaxrlhf.config import (
    PPO,
    Config,
    Evaluation,
    HubData,
    KLInReward,
    ModelReward,
    Optimizer,
    Pretrained,
    Rewards,
    Rollout,
    Training,
)

PROMPTS, PROMPTS_PER_STEP = 43_835, 1024


def get_config() -> Config:
    """Return the configuration of the run."""
    return Config(
        name="hh_ppo",
        model=Pretrained("Qwen/Qwen2.5-7B-Instruct"),
        data=HubData("trl-lib/hh-rlhf-helpful-base", answer_key=None),
        rewards=Rewards(parts=(ModelReward("models/hh_reward_model"),)),
        algorithm=PPO(
            gamma=1.0,
            lam=0.95,
            responses_per_update=128,
            kl=KLInReward(coefficient=0.01, estimator="k1"),
            critic_model=Pretrained("models/hh_reward_model"),
            critic=training(learning_rate=9e-6),
        ),
        rollout=Rollout(prompts_per_step=PROMPTS_PER_STEP, max_prompt_tokens=1024, max_response_tokens=1024),
        actor=training(learning_rate=5e-7),
        placement="auto",
        steps=2 * (PROMPTS // PROMPTS_PER_STEP),
        evaluation=Evaluation(every_steps=10),
    )


def training(*, learning_rate: float) -> Training:
    """Return training settings of a model."""
    return Training(
        optimizer=Optimizer(learning_rate=learning_rate, warmup_updates=10, weight_decay=0.0),
        tokens_per_microbatch=65_536,
    )
