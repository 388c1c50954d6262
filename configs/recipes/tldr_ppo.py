"""Summaries of posts, stage 3 of 3: PPO on the scores of the reward model, four models of 1.5B on a machine of H100.

    python -m jaxrlhf.train --config tldr_ppo.py

The policy comes from `tldr_sft.py`, reward model and critic come from `tldr_reward_model.py`. The run samples a million
summaries of up to 53 tokens, 512 a step, and trains on them in four passes.

Planned: Qwen2.5-1.5B on h100x1x8 47 of 75 GiB of a device, 10 s a step, 5.7 h.

Source: Huang et al. 2024 (arXiv:2403.17031) for batch, learning rate, KL, passes and length, there with Pythia and with
a penalty for summaries without an end, which is left out; the posts are Stiennon et al. 2020 (arXiv:2009.01325).
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
    Sampling,
    Training,
)

SUMMARIES, SUMMARIES_PER_STEP = 1_000_000, 512


def get_config() -> Config:
    """Return the configuration of the run."""
    return Config(
        name="tldr_ppo",
        model=Pretrained("models/tldr_sft"),
        data=HubData("trl-lib/tldr", answer_key=None, evaluation="validation"),
        rewards=Rewards(parts=(ModelReward("models/tldr_reward_model"),)),
        algorithm=PPO(
            gamma=1.0,
            lam=0.95,
            responses_per_update=SUMMARIES_PER_STEP,
            epochs_per_step=4,
            kl=KLInReward(coefficient=0.05, estimator="k1"),
            critic_model=Pretrained("models/tldr_reward_model"),
            critic=training(),
        ),
        rollout=Rollout(
            prompts_per_step=SUMMARIES_PER_STEP,
            max_prompt_tokens=640,
            max_response_tokens=53,
            sampling=Sampling(temperature=0.7),
        ),
        actor=training(),
        placement="auto",
        steps=SUMMARIES // SUMMARIES_PER_STEP,
        evaluation=Evaluation(every_steps=100),
    )


def training() -> Training:
    """Return training settings of policy and critic."""
    return Training(
        optimizer=Optimizer(learning_rate=3e-6, decay="linear", eps=1e-5, weight_decay=0.0),
        tokens_per_microbatch=131_072,
    )
