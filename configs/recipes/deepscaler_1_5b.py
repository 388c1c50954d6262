"""Long reasoning as in DeepScaleR, from DeepSeek-R1-Distill-Qwen-1.5B, on a machine of eight H100.

    python -m jaxrlhf.train --config deepscaler_1_5b.py --rollout.max-response-tokens 8192 --steps 240

GRPO with responses of up to 24k tokens. DeepScaleR has three stages, each from the export of the stage before: 8k
(240 steps, `--rollout.responses-per-prompt 8`), 16k (290 steps) and 24k tokens (50 steps, as here). Set `--model.path`
and `--rollout.max-response-tokens` for each stage. Few responses are that long: a step trains on the groups that are
complete first, and unfinished groups continue under the next weights (`staleness`, `over_provision`). docs/recipes.md
has the gain by the plan.

Planned: DeepSeek-R1-Distill-Qwen-1.5B on h100x1x8 46 of 75 GiB of a device, 309 s a step, 4.3 h.

Source: Luo et al. 2025 (DeepScaleR, https://github.com/agentica-project/rllm); steps of its stages as in NeMo RL's
guide (https://github.com/NVIDIA-NeMo/RL, docs/guides/grpo-deepscaler.md); GRPO is Shao et al. 2024 (arXiv:2402.03300),
groups that continue in a later step are Zhou et al. 2025 (APRIL, arXiv:2509.18521).
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
    """Return the configuration of the run; the data set is one JSON list, so the hub's parquet form of it is read."""
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
