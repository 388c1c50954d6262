"""GRPO of Qwen2.5-VL on geometry3k: problems with a figure, answers in a box.

    hf download hiyouga/geometry3k --repo-type dataset --local-dir geometry3k
    python -m jaxrlhf.train --config grpo_geometry3k.py

Prompts are texts with `<image>` in the place of the figure. The answer is compared as mathematics.

Source: Shao et al. 2024 (arXiv:2402.03300); Lu et al. 2021 (Inter-GPS, arXiv:2105.04165).
"""

from jaxrlhf.config import (
    GRPO,
    Config,
    Evaluation,
    KLInLoss,
    Layout,
    MathReward,
    Optimizer,
    Pretrained,
    PromptFile,
    Rewards,
    Rollout,
    Training,
)


def get_config() -> Config:
    """Return the configuration of the run."""
    return Config(
        name="grpo_geometry3k",
        model=Pretrained("Qwen/Qwen2.5-VL-3B-Instruct", vision=True),
        data=PromptFile(
            train="geometry3k/data/train-00000-of-00001.parquet",
            evaluation="geometry3k/data/test-00000-of-00001.parquet",
            prompt_key="problem",
            image_key="images",
        ),
        rewards=Rewards(parts=(MathReward(),)),
        algorithm=GRPO(responses_per_update=128, kl=KLInLoss(coefficient=0.01, estimator="k3")),
        rollout=Rollout(prompts_per_step=64, responses_per_prompt=8, max_prompt_tokens=1024, max_response_tokens=2048),
        actor=Training(
            layout=Layout(fsdp=8),
            optimizer=Optimizer(learning_rate=1e-6),
            tokens_per_microbatch=65_536,
        ),
        steps=100,
        evaluation=Evaluation(every_steps=10),
    )
