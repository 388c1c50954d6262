"""Long reasoning in DeepScaleR's manner, from DeepSeek-R1-Distill-Qwen-1.5B.

    python -m jaxrlhf.train --config deepscaler_1_5b.py --rollout.max-response-tokens 8192 --steps 240

GRPO with responses of up to 24k tokens. DeepScaleR gets there in three stages, each from the export of the one before:
8k (240 steps, `--rollout.responses-per-prompt 8`), 16k (290 steps) and 24k (50 steps, as here), of which `--model.path`
and `--rollout.max-response-tokens` are the settings. Few responses are that long, so groups are put off until they are
complete while others go on (`staleness`, `over_provision`), which the plan has at a good part of the step. A machine of
eight H100.

Planned: DeepSeek-R1-Distill-Qwen-1.5B on h100x1x8 46 of 75 GiB of a device, 309 s a step, 4.3 h.

Source: Luo et al. 2025 (DeepScaleR, https://github.com/agentica-project/rllm); steps of its stages as in NeMo RL's
guide (https://github.com/NVIDIA-NeMo/RL, docs/guides/grpo-deepscaler.md); GRPO is Shao et al. 2024 (arXiv:2402.03300),
groups that are put off Zhou et al. 2025 (APRIL, arXiv:2509.18521).
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
    Sampling,
    Training,
)

RESPONSES_PER_PROMPT = 16


def get_config() -> Config:
    """The run; the hub's own parquet of a data set that is published as one JSON list."""
    return Config(
        name="deepscaler_1_5b",
        model=Pretrained("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"),
        data=HubData(
            "agentica-org/DeepScaleR-Preview-Dataset",
            revision="refs/convert/parquet",
            prompt_key="problem",
            evaluation=None,
        ),
        rewards=Rewards(parts=(MathReward(),), workers=8),
        algorithm=GRPO(responses_per_update=64 * RESPONSES_PER_PROMPT, kl=KLInLoss(coefficient=0.001, estimator="k3")),
        rollout=Rollout(
            prompts_per_step=128,
            responses_per_prompt=RESPONSES_PER_PROMPT,
            max_prompt_tokens=1024,
            max_response_tokens=24_576,
            sampling=Sampling(temperature=0.6),
            staleness=1,
            over_provision=1.5,
        ),
        actor=Training(optimizer=Optimizer(learning_rate=1e-6), tokens_per_microbatch=8 * 25_600),
        placement="auto",
        steps=50,
        evaluation=Evaluation(
            every_steps=10,
            sets=(
                EvaluationSet(
                    name="aime_2024",
                    data=HubData("HuggingFaceH4/aime_2024", prompt_key="problem", evaluation="train"),
                    samples=16,
                    sampling=Sampling(temperature=0.6, top_p=0.95),
                ),
            ),
        ),
    )
