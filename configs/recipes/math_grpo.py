"""GRPO on MATH from Qwen2.5-Instruct of any size, on any devices.

    python -m jaxrlhf.train --config math_grpo.py --model.path Qwen/Qwen2.5-0.5B-Instruct

The default size is 1.5B. A step has 1024 of the 7500 training problems with 5 responses each, and four updates; the run
has 15 epochs. The evaluation has the 500 problems of MATH-500. The reference answer is in the box of the worked
solution. A v5e-8 slice is enough for 0.5B and 1.5B, a machine of eight H100 for 7B.

Planned: Qwen2.5-0.5B-Instruct on v5e-8 13 of 15 GiB of a device, 60 s a step, 1.7 h; Qwen2.5-1.5B-Instruct on v5e-8 13
of 15 GiB of a device, 152 s a step, 4.4 h; Qwen2.5-7B-Instruct on h100x1x8 51 of 75 GiB of a device, 124 s a step, 3.6
h.

Source: verl's example of this task (https://github.com/volcengine/verl, examples/grpo_trainer/run_qwen2-7b_math.sh);
Shao et al. 2024 (arXiv:2402.03300); the problems are Hendrycks et al. 2021 (arXiv:2103.03874), the 500 of Lightman et
al. 2023 (arXiv:2305.20050).
"""

from jaxrlhf.config import (
    GRPO,
    Config,
    Evaluation,
    EvaluationSet,
    HubData,
    KLInLoss,
    MathReward,
    Optimizer,
    Pretrained,
    Rewards,
    Rollout,
    Training,
)

PROMPTS_PER_STEP, RESPONSES_PER_PROMPT = 1024, 5


def get_config() -> Config:
    """Return the configuration of the run."""
    return Config(
        name="math_grpo",
        model=Pretrained("Qwen/Qwen2.5-1.5B-Instruct"),
        data=HubData(
            "DigitalLearningGmbH/MATH-lighteval", prompt_key="problem", answer_key="solution", evaluation=None
        ),
        system_prompt="Think step by step, and give the final answer in \\boxed{}.",
        rewards=Rewards(parts=(MathReward(),), workers=8),
        algorithm=GRPO(
            responses_per_update=PROMPTS_PER_STEP * RESPONSES_PER_PROMPT // 4,
            kl=KLInLoss(coefficient=0.001, estimator="k3"),
        ),
        rollout=Rollout(
            prompts_per_step=PROMPTS_PER_STEP,
            responses_per_prompt=RESPONSES_PER_PROMPT,
            max_prompt_tokens=1024,
            max_response_tokens=1024,
        ),
        actor=Training(optimizer=Optimizer(learning_rate=1e-6), tokens_per_microbatch=65_536),
        placement="auto",
        steps=15 * (7500 // PROMPTS_PER_STEP),
        evaluation=Evaluation(
            every_steps=10,
            sets=(
                EvaluationSet(
                    name="math_500", data=HubData("HuggingFaceH4/MATH-500", prompt_key="problem"), problems=500
                ),
            ),
        ),
    )
