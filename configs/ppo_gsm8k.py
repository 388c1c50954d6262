"""PPO on GSM8K from Qwen2.5-0.5B-Instruct.

    python -m jaxrlhf.train --config ppo_gsm8k.py

A step has 256 problems, and four updates of 64 responses each. The KL penalty in the reward is 0.001. The run has 15
epochs of the 7473 training problems. No result at this size yet: the run needs an accelerator.

Four steps of 32 problems ran from SmolLM2-135M-Instruct on two cores, after 10 supervised updates on GSM8K's solutions:
152 s a step, 7.2 GB, scores of 0 to 3 %, as that model is too small for these problems (`docs/real_model.md`).

Source: Schulman et al. 2017 (arXiv:1707.06347); the problems are Cobbe et al. 2021 (arXiv:2110.14168);
hyper-parameters as in the quickstart of verl, the implementation of HybridFlow (Sheng et al. 2025, arXiv:2409.19256).
"""

from jaxrlhf.config import (
    PPO,
    Checkpointing,
    Config,
    Evaluation,
    Gsm8k,
    Gsm8kReward,
    KLInReward,
    Optimizer,
    Pretrained,
    Rewards,
    Rollout,
    Training,
)

TRAIN_PROBLEMS, TEST_PROBLEMS = 7473, 1319
EPOCHS = 15
PROMPTS_PER_STEP = 256


def get_config() -> Config:
    """Return the configuration of the run."""
    return Config(
        name="ppo_gsm8k",
        model=Pretrained("Qwen/Qwen2.5-0.5B-Instruct"),
        data=Gsm8k(),
        rewards=Rewards(parts=(Gsm8kReward(method="strict"),)),
        algorithm=PPO(
            gamma=1.0,
            lam=1.0,
            responses_per_update=64,
            kl=KLInReward(coefficient=0.001, estimator="k1"),
            critic=Training(optimizer=Optimizer(learning_rate=1e-5)),
        ),
        rollout=Rollout(
            prompts_per_step=PROMPTS_PER_STEP,
            responses_per_prompt=1,
            max_prompt_tokens=512,
            max_response_tokens=512,
        ),
        actor=Training(optimizer=Optimizer(learning_rate=1e-6)),
        steps=EPOCHS * (TRAIN_PROBLEMS // PROMPTS_PER_STEP),
        evaluation=Evaluation(every_steps=10, problems=TEST_PROBLEMS),
        checkpoint=Checkpointing(every_steps=10),
    )
