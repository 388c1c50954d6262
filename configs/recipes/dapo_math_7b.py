"""DAPO on DAPO-Math-17k from Qwen2.5-7B, on a machine of eight H100 or more.

    python -m jaxrlhf.train --config dapo_math_7b.py

Dynamic sampling, up to 512 problems a step whose 16 responses score differently, in 16 updates; no KL. Responses have
up to 8k tokens, of which the last 4k are punished the more the longer they are; AIME 2024 is answered 32 times each
between. `dapo_math_32b.py` is the paper's own size.

Planned: Qwen2.5-7B on h100x1x8 51 of 75 GiB of a device, 1,510 s a step, 83.9 h.

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
    """The run, of the problems in English, each of which the data set has once."""
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
