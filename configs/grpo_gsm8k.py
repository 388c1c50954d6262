"""GRPO on GSM8K from Qwen2.5-0.5B-Instruct.

    python -m jaxrlhf.train --config grpo_gsm8k.py

A step has 256 problems with 5 responses each, and four updates of 64 problems. The KL penalty in the loss is 0.001. The
run has 15 epochs of the 7473 training problems. No result at this size yet: the run needs an accelerator.

Four steps of 8 problems x 4 responses ran from SmolLM2-135M-Instruct on two cores, after 10 supervised updates on
GSM8K's solutions: 71 s a step, 5.6 GB, scores of 0 to 3 %, as that model is too small for these problems
(`docs/real_model.md`).

Source: Shao et al. 2024 (arXiv:2402.03300); the problems are Cobbe et al. 2021 (arXiv:2110.14168).
"""

from jaxrlhf.config import (
    GRPO,
    Checkpointing,
    Config,
    Evaluation,
    Gsm8k,
    Gsm8kReward,
    KLInLoss,
    Optimizer,
    Pretrained,
    Rewards,
    Rollout,
    Training,
)

TRAIN_PROBLEMS, TEST_PROBLEMS = 7473, 1319
EPOCHS = 15
PROMPTS_PER_STEP = 256
RESPONSES_PER_PROMPT = 5


def get_config() -> Config:
    """Return the configuration of the run."""
    return Config(
        name="grpo_gsm8k",
        model=Pretrained("Qwen/Qwen2.5-0.5B-Instruct"),
        data=Gsm8k(),
        rewards=Rewards(parts=(Gsm8kReward(method="strict"),)),
        algorithm=GRPO(
            responses_per_update=64 * RESPONSES_PER_PROMPT,
            kl=KLInLoss(coefficient=0.001, estimator="k3"),
        ),
        rollout=Rollout(
            prompts_per_step=PROMPTS_PER_STEP,
            responses_per_prompt=RESPONSES_PER_PROMPT,
            max_prompt_tokens=512,
            max_response_tokens=512,
            slots=256,
        ),
        actor=Training(optimizer=Optimizer(learning_rate=1e-6)),
        steps=EPOCHS * (TRAIN_PROBLEMS // PROMPTS_PER_STEP),
        evaluation=Evaluation(every_steps=10, problems=TEST_PROBLEMS),
        checkpoint=Checkpointing(every_steps=10),
    )
