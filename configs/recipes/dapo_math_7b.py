"""DAPO on DAPO-Math-17k from Qwen2.5-7B, on a machine of eight H100 or more.

    python -m jaxrlhf.train --config dapo_math_7b.py

Dynamic sampling: a step has up to 512 problems whose 16 responses score differently, and 16 updates. There is no KL.
Responses have up to 8k tokens, and a penalty grows over the last 4k tokens. The evaluation answers each problem of AIME
2024 32 times. `dapo_math_32b.py` has the paper's model size.

Planned: Qwen2.5-7B on h100x1x8 51 of 75 GiB of a device, 1,281 s a step, 71.2 h.

Source: Yu et al. 2025 (DAPO, arXiv:2503.14476), section 4.1; verl's recipes of it (https://github.com/volcengine/verl,
recipe/dapo/run_dapo_qwen2.5_32b.sh); 8k tokens are a choice for this size.
"""

from jaxrlhf.config import (
    DAPO,
    Config,
    Evaluation,
    EvaluationSet,
    HubData,
    MathReward,
    Optimizer,
    OverlongPunishment,
    Pretrained,
    Rewards,
    Rollout,
    Training,
)

RESPONSES_PER_PROMPT = 16


def get_config() -> Config:
    """Return the configuration of the run; the subset `en` has each problem in English once."""
    return Config(
        name="dapo_math_7b",
        model=Pretrained("Qwen/Qwen2.5-7B"),
        data=HubData("open-r1/DAPO-Math-17k-Processed", subset="en", answer_key="solution", evaluation=None),
        system_prompt="Think step by step, and give the final answer in \\boxed{}.",
        rewards=Rewards(parts=(MathReward(),), workers=8),
        algorithm=DAPO(
            responses_per_update=32 * RESPONSES_PER_PROMPT,
            overlong=OverlongPunishment(buffer_share=0.5),
            max_rounds=10,
        ),
        rollout=Rollout(
            prompts_per_step=512,
            responses_per_prompt=RESPONSES_PER_PROMPT,
            max_prompt_tokens=2048,
            max_response_tokens=8192,
        ),
        actor=Training(
            optimizer=Optimizer(learning_rate=1e-6, warmup_updates=10, weight_decay=0.1), tokens_per_microbatch=131_072
        ),
        placement="auto",
        steps=200,
        evaluation=Evaluation(
            every_steps=5,
            sets=(
                EvaluationSet(
                    name="aime_2024",
                    data=HubData("HuggingFaceH4/aime_2024", prompt_key="problem", evaluation="train"),
                    samples=32,
                ),
            ),
        ),
    )
